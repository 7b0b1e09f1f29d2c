"""What the operator will do, before anything runs.

    python examples/plan.py
"""

import moe4

for recompute in (False, True):
    print(moe4.plan(8, 4096, 14336, recompute=recompute))
    print()
experts = moe4.GroupedMLP(4, 64, 32, activation="srelu", device="meta")
print(experts.plan(weight_grad=False))
