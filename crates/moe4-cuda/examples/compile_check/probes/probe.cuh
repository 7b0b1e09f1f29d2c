// Headers include each other by the names that they are given to the compiler under.
#pragma once

#include "inner.cuh"
