"""The collectives of ``MoELayer``, in parts that other work can go between, and errors that say which one failed.

Rows to other processes and back are two nodes of autograd each::

    forward    begin: start        other work        end: wait
    backward   begin: wait         other work        end: start the same way back

Autograd runs what was recorded later first, so the gradients of other work that was done between the two are computed
between the two again.

A transport's own error names a socket, or how long it waited. Here it becomes the cause of one that names the
collective. NCCL's errors do not come this way: its waits return when they are enqueued, and its watchdog ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """A process group that is not kept alive.

    torch keeps it until ``destroy_process_group``. Whoever keeps it longer, such as a layer or the graph behind an output
    in a variable of a script, keeps gloo's threads until the interpreter ends, which then aborts the process now and then.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError(
                "MoELayer: expected a process group, got one that was destroyed; call destroy_process_group after the "
                "last forward and backward"
            )
        return group


def all_reduce(x: Tensor, what: str, group: dist.ProcessGroup) -> None:
    """The sum over the processes, in place."""
    with _named(f"all-reduce of {what}", group):
        dist.all_reduce(x, group=group)


def all_to_all_equal(x: Tensor, what: str, group: dist.ProcessGroup) -> Tensor:
    """An equal part of ``x`` to every process."""
    out = torch.empty_like(x)
    with _named(f"all-to-all of {what}", group):
        dist.all_to_all_single(out, x, group=group)
    return out


class Exchange:
    """Runs of rows to every process; their gradients go the same way back. One for each tensor of each forward.

    Args:
        what: rows, and where they go: ``the rows to the experts``.
        back: gradients, and where they go.
        sent, received: rows to and from each process.
        group: the processes.
        beside: an exchange that is under way at the same time. When this one fails, it waits for the other as well:
            a thread of gloo that is still at work when the interpreter ends aborts the process.
    """

    def __init__(
        self,
        what: str,
        back: str,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
        beside: Optional[Exchange] = None,
    ) -> None:
        self.what, self.back, self.sent, self.received = what, back, sent, received
        self._group = Group(group)
        self._on_the_way: Optional[tuple[str, dist.Work, Tensor]] = None
        # Weak: a cycle would keep what is under way until the interpreter looks for cycles.
        self._beside = None if beside is None else weakref.ref(beside)
        if beside is not None:
            beside._beside = weakref.ref(self)

    def begin(self, x: Tensor) -> Tensor:
        """Starts. Returns an empty tensor for :meth:`end`, which ties the two together for autograd."""
        link: Tensor = _Begin.apply(x, self)  # type: ignore[no-untyped-call]
        return link

    def end(self, link: Tensor) -> Tensor:
        """Waits for the rows: on a GPU its stream does, not the host."""
        out: Tensor = _End.apply(link, self)  # type: ignore[no-untyped-call]
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """Starts and waits."""
        return self.end(self.begin(x))

    def start(self, x: Tensor, *, backward: bool) -> None:
        what, sent, received = self.what, self.sent, self.received
        if backward:
            what, sent, received = self.back, received, sent
        name = f"all-to-all of {what} ({'backward' if backward else 'forward'})"
        x = x.contiguous()
        out = x.new_empty((sum(received), *x.shape[1:]))
        # As bytes: not every transport knows every dtype.
        width = x.element_size() * x.shape[1:].numel()
        bytes_in, bytes_out = (t.reshape(-1).view(torch.uint8).view(-1, width) for t in (x, out))
        group = self._group()
        with _named(name, group):
            work = dist.all_to_all_single(bytes_out, bytes_in, received, sent, group=group, async_op=True)
        assert work is not None
        self._on_the_way = name, work, out

    def wait(self) -> Tensor:
        assert self._on_the_way is not None
        (name, work, out), self._on_the_way = self._on_the_way, None
        try:
            with _named(name, self._group()):
                work.wait()
        except dist.DistBackendError:
            beside = None if self._beside is None else self._beside()
            if beside is not None:
                beside.abandon()
            raise
        return out

    def abandon(self) -> None:
        """Waits for what is under way, if anything is, whatever becomes of it."""
        if self._on_the_way is not None:
            with suppress(dist.DistBackendError):
                self.wait()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(x, backward=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, link: Tensor) -> Any:
        return ctx.exchange.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.exchange.start(grad, backward=True)
        return grad.new_empty(0), None


@contextmanager
def _named(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        raise dist.DistBackendError(
            f"MoELayer: {what}: expected all {world} processes of group {group.group_desc!r} "
            f"({dist.get_backend(group)}) to take part, got on rank {rank}: {error}. Look for the process that ended or "
            "hangs, and at what it said first. How long a wait lasts is the timeout of init_process_group or new_group"
        ) from error
