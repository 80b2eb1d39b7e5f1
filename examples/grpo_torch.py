#!/usr/bin/env python3
"""GRPO (and PPO) in plain PyTorch with refit in the loop: the file to copy from.

One trainer process and some rollout workers teach a small transformer to add two digits. In each
cycle

    refit      the optimizer's states leave the device, and all workers switch to the new weights
    roll out   workers sample answers; meanwhile the device's memory is free for an inference engine
    restore    the states start to come back; the objective and the backward pass do not need them
    step       waits for them by itself

Read `train` for the trainer's end and `work` for the workers'. grpo_torch_model.py has what is not
about refit: the task, the policy and the objectives.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import refit
import torch
from grpo_torch_memory import memory_picture
from grpo_torch_model import (
    HEADS,
    REWARD_MOST,
    Batch,
    Policy,
    Samples,
    Size,
    grpo_samples,
    objective,
    ppo_samples,
    roll_out,
    shuffled,
)
from refit.errors import DeadlineError, PeerError, RefitError

EPOCHS = 2
MINIBATCHES = 4
LEARNING_RATE = 2e-3
ENTROPY = 0.02
TRIES = 4
CYCLES, TARGET = 200, 0.9
WORKERS_TIMEOUT_S = 120.0


class Result(NamedTuple):
    """A run's figures, and what it has trained."""

    rewards: list[float]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: list[torch.Tensor]
    pictures: list[str]


# ---- The worker's end ----------------------------------------------------------------------------


def work(size: Size, endpoint: str, worker: int, seed: int, pipe: Connection) -> None:
    """A rollout worker: takes each version, loads it, and samples from it."""
    obey_the_trainer()
    be_deterministic()
    policy = Policy(size)
    with refit.Subscriber(endpoint, worker=f"rollout-{worker}") as subscriber:
        for update in versions(subscriber):  # whole, verified, committed versions only
            with update:  # accepted at its end; refused if loading fails
                update.load_into(policy)
                version = update.version
            send_batch(pipe, roll_out(policy, seed, version, worker))


# ---- The trainer's end ---------------------------------------------------------------------------


def train(options: argparse.Namespace, show: "Show") -> Result:
    """The loop, with refit."""
    policy, optimizer = make_policy(options)
    result = Result([], [], {}, [], [])
    worker = partial(work, size_of(options))
    with (
        refit.Publisher("user://*", options.config) as publisher,
        Fleet(options.workers, worker, publisher.endpoint, options.seed) as workers,
        ExitStack() as opened,
    ):
        activations = None
        if options.activations:
            activations = opened.enter_context(closing(activations_of(policy, options)))
        schedule = schedule_of(options)
        controller = opened.enter_context(
            refit.Controller(
                optimizer,
                policy,
                options.config,
                schedule=schedule,
                activations=activations,
                weights="park" if options.park else "stay",
            )
        )
        publisher.wait_workers(options.workers, WORKERS_TIMEOUT_S)
        for cycle in range(1, options.cycles + 1):
            version = refit_workers(controller, publisher, workers, policy)
            batches = workers.gather(version)
            controller.restore()  # the copies overlap what follows; optimizer.step() waits
            loss = update_policy(policy, optimizer, batches, cycle, options, activations)
            result.losses.append(loss)
            result.rewards.append(mean_reward(batches))
            show.cycle(cycle, version, result.rewards[-1], loss, controller.stats())
            if options.save_every and cycle % options.save_every == 0:
                save(controller, policy, cycle, options.save_dir)
    result = finished(result, policy, optimizer)
    if options.activations:
        part = next(shuffled(samples_of(policy, batches), MINIBATCHES))
        with closing(activations_of(policy, options)) as activations:
            lines = memory_picture(policy, partial(objective, policy, part, ENTROPY), activations)
        result.pictures.extend(lines)
    return result


def activations_of(policy: Policy, options: argparse.Namespace) -> refit.ActivationOffload:
    """What the policy's blocks save in the forward pass leaves until the backward pass comes to
    it. Each block is a group; the last one stays, since it is needed first."""
    return refit.ActivationOffload(
        policy,
        policy.blocks,
        host_bytes=options.activation_bytes,
        aim="memory",
        config=options.config,
    )


def schedule_of(options: argparse.Namespace) -> list[Any]:
    """Where states live: on the device between restore and offload, or on the host, from where they
    visit the device in windows while the optimizer steps; and the share that the CPU steps."""
    share = refit.CpuStep(fraction=options.host_fraction)
    if options.states == "cycle":
        return [share]
    return [refit.HostStates(window_bytes=options.window_bytes), share]


def refit_workers(
    controller: refit.Controller, publisher: refit.Publisher, workers: "Fleet", policy: Policy
) -> int:
    """States off the device, weights to the workers. A worker that died is named and replaced."""
    before = publisher.version
    for _ in range(TRIES):
        try:
            with controller.refit(publisher=publisher) as tx:
                tx.send(refit.named_weights(policy, names=without_critic))
            return publisher.version
        except (PeerError, DeadlineError) as why:
            print(f"grpo: {why}", file=sys.stderr)
            replace_lost_workers(publisher, workers)
            if publisher.version != before:
                return publisher.version  # the others have it, and a new worker is sent it
    raise WorkerLost(f"the workers did not hold in {TRIES} tries")


def replace_lost_workers(publisher: refit.Publisher, workers: "Fleet") -> None:
    """Until all have subscribed. A process may be seen to have ended later than its connection."""
    deadline = time.monotonic() + WORKERS_TIMEOUT_S
    while True:
        workers.repair()
        try:
            publisher.wait_workers(workers.count, 0.2)
            return
        except DeadlineError:
            if time.monotonic() > deadline:
                raise


def without_critic(name: str) -> str | None:
    """Workers have no use for the value head."""
    return None if name.startswith("value.") else name


def save(controller: refit.Controller, policy: Policy, cycle: int, folder: Path) -> None:
    """A checkpoint. The states can be read wherever they are, and nothing tears them meanwhile."""
    with controller.checkpoint() as states:
        write_checkpoint(folder, cycle, policy, states)


# ---- The worker processes ------------------------------------------------------------------------

# Each is spawned, not forked: a forked process would share the trainer's threads and sockets, which
# no library survives. Batches come back through a pipe of its own.

GATHER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
REPLACEMENTS_MOST = 8

Work = Callable[[str, int, int, Connection], None]


class WorkerLost(Exception):
    """A worker died too often."""


class _Worker(NamedTuple):
    process: Any
    pipe: Connection


class Fleet:
    """`count` processes that run `work`. A context manager: they have ended when it has."""

    def __init__(self, count: int, work: Work, endpoint: str, seed: int) -> None:
        self.count = count
        self._work = work
        self._endpoint = endpoint
        self._seed = seed
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        for index in range(self.count):
            self._workers.append(self._start(index))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(END_TIMEOUT_S)
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    def gather(self, version: int) -> list[Batch]:
        """What each worker has sampled from `version`."""
        return [self._receive(index, version) for index in range(self.count)]

    def repair(self) -> None:
        """Replaces the workers that have died."""
        for index, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                self._replace(index)

    def _receive(self, index: int, version: int) -> Batch:
        for _ in range(REPLACEMENTS_MOST):
            batch = self._read(index)
            while batch is not None and batch.version < version:  # of a publish that was repeated
                batch = self._read(index)
            if batch is not None:
                return batch
            self._replace(index)
        raise WorkerLost(f"worker {index} died {REPLACEMENTS_MOST} times: giving up")

    def _read(self, index: int) -> Batch | None:
        """None if the worker is gone, or says nothing for too long."""
        pipe = self._workers[index].pipe
        try:
            if not pipe.poll(GATHER_TIMEOUT_S):
                return None
            version, *arrays = pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return Batch(version, *map(torch.from_numpy, arrays))

    def _replace(self, index: int) -> None:
        old = self._workers[index]
        old.process.kill()
        old.process.join()
        old.pipe.close()
        print(
            f"grpo: worker rollout-{index} (pid {old.process.pid}) ended with "
            f"{old.process.exitcode}; a new one takes its place",
            file=sys.stderr,
        )
        self._workers[index] = self._start(index)

    def _start(self, index: int) -> _Worker:
        mine, theirs = self._spawn.Pipe(duplex=False)
        arguments = (self._endpoint, index, self._seed, theirs)
        process = self._spawn.Process(target=self._work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, mine)


def obey_the_trainer() -> None:
    """In a worker: Ctrl-C is the trainer's, which then asks its workers to end, in good order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def versions(subscriber: refit.Subscriber) -> Iterator[refit.Update]:
    """Like iterating the subscriber, but it ends when the trainer's process is gone, too."""
    trainer = multiprocessing.parent_process()
    gone = [] if trainer is None else [trainer.sentinel]
    while not any(one in gone for one in wait([*gone, subscriber.fileno()])):
        try:
            update = subscriber.next(0)
        except DeadlineError:
            continue
        yield update


def send_batch(pipe: Connection, batch: Batch) -> None:
    """Through the pipe as arrays: torch would share each tensor's memory by a file of its own."""
    pipe.send((batch.version, *(tensor.numpy() for tensor in batch[1:])))


# ---- Checkpoints: a .pt to go on from, and the weights alone for inference engines ---------------


class CheckpointError(Exception):
    """A checkpoint that cannot be written or loaded."""


def write_checkpoint(folder: Path, cycle: int, policy: Policy, optimizer: dict[str, Any]) -> None:
    """Both files of a cycle; each gets its name when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cycle-{cycle:05d}.pt"
    _write_weights(path.with_suffix(".safetensors"), policy)
    part = path.with_suffix(".pt.part")
    torch.save({"cycle": cycle, "policy": policy.state_dict(), "optimizer": optimizer}, part)
    os.replace(part, path)


def load_weights(path: Path, policy: Policy) -> None:
    """The weights of an earlier run's .pt; its optimizer's states are left where they are."""
    try:
        policy.load_state_dict(torch.load(path, weights_only=True)["policy"])
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as why:
        raise CheckpointError(
            f"{path} does not hold the weights of a policy like this one (with these --width, "
            f"--layers, --ppo): {why}"
        ) from why


def require_safetensors() -> None:
    """CheckpointError if weights cannot be written as safetensors, before any work is lost."""
    if importlib.util.find_spec("safetensors") is None:
        raise CheckpointError("--save-every writes safetensors: pip install safetensors")


def _write_weights(path: Path, policy: Policy) -> None:
    from safetensors.torch import save_file

    weights = {name: one.to(torch.bfloat16).clone() for name, one in policy.named_parameters()}
    part = path.with_suffix(".safetensors.part")
    save_file(weights, part)
    os.replace(part, path)


# ---- What is the same without refit --------------------------------------------------------------


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    cycle: int,
    options: argparse.Namespace,
    activations: refit.ActivationOffload | None = None,
) -> float:
    """Some passes over what the workers sampled; the last one's loss. With `activations`, what the
    forward pass saves leaves the device until the backward pass."""
    ahead = left(cycle, options)
    optimizer.param_groups[0]["lr"] = options.learning_rate * ahead
    samples = samples_of(policy, batches)
    for _ in range(EPOCHS):
        for part in shuffled(samples, MINIBATCHES):
            with activations or nullcontext():
                loss = objective(policy, part, ENTROPY * ahead)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    return loss.item()


def samples_of(policy: Policy, batches: list[Batch]) -> Samples:
    return grpo_samples(batches) if policy.value is None else ppo_samples(policy, batches)


def left(cycle: int, options: argparse.Namespace) -> float:
    """How much there is still to learn, and to try: from 1 down to a tenth."""
    return max(0.1, 1.0 - cycle / options.cycles)


def make_policy(options: argparse.Namespace) -> tuple[Policy, torch.optim.Optimizer]:
    """Both runs of --check begin with the same bits."""
    torch.manual_seed(options.seed)
    policy = Policy(size_of(options), critic=options.ppo)
    if options.start:
        load_weights(options.start, policy)
    rate = options.learning_rate
    return policy, torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.95))


def size_of(options: argparse.Namespace) -> Size:
    return Size(options.width, options.layers)


def train_without_refit(options: argparse.Namespace) -> Result:
    """What --check compares with: one process, states that never leave, no weights sent."""
    policy, optimizer = make_policy(options)
    result = Result([], [], {}, [], [])
    for cycle in range(1, options.cycles + 1):
        workers = range(options.workers)
        batches = [roll_out(policy, options.seed, cycle, worker) for worker in workers]
        result.losses.append(update_policy(policy, optimizer, batches, cycle, options))
        result.rewards.append(mean_reward(batches))
    return finished(result, policy, optimizer)


def mean_reward(batches: list[Batch]) -> float:
    return torch.cat([batch.rewards for batch in batches]).sum(dim=1).mean().item()


def finished(result: Result, policy: Policy, optimizer: torch.optim.Optimizer) -> Result:
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    states = [one for parameter in trained for one in optimizer.state[parameter].values()]
    return result._replace(weights=weights, states=[one.clone() for one in states])


def be_deterministic() -> None:
    """The same bits in each run and in each process."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


# ---- What is printed: a line every ten cycles, a bar on a terminal, JSON -------------------------


HEADER = (
    "cycle  version  reward     loss   out MB  out ms  publish ms  commit ms  blocked ms  workers"
)
EVERY = 10


class Show:
    """A context manager; `quiet` leaves the JSON only."""

    def __init__(self, cycles: int, path: Path | None, quiet: bool = False) -> None:
        self._cycles = cycles
        self._json = path.open("w") if path is not None else None
        self._quiet = quiet
        self._bar = None if quiet else _bar(cycles)
        if not quiet:
            print(HEADER)

    def cycle(
        self, cycle: int, version: int, reward: float, loss: float, stats: dict[str, float]
    ) -> None:
        """Shows one cycle; `stats` are those of the controller."""
        if self._json is not None:
            line = {"cycle": cycle, "version": version, "reward": reward, "loss": loss}
            print(json.dumps({**line, "stats": stats}), file=self._json, flush=True)
        if self._bar is not None:
            self._bar.update()
        if not self._quiet and (cycle % EVERY == 0 or cycle in (1, self._cycles)):
            self._print(_line(cycle, version, reward, loss, stats))

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._json is not None:
            self._json.close()


def _bar(cycles: int) -> Any:
    """On a terminal, where tqdm is installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=cycles, unit="cycle", leave=False)


def _line(cycle: int, version: int, reward: float, loss: float, stats: dict[str, float]) -> str:
    def of(name: str, scale: float) -> float:
        return stats.get(name, 0.0) * scale

    return (
        f"{cycle:5}  {version:7}  {reward:6.3f}  {loss:7.4f}"
        f"  {of('refit/offload_bytes', 1e-6):7.2f}  {of('refit/offload_s', 1e3):6.2f}"
        f"  {of('refit/publish_s', 1e3):10.2f}"
        f"  {of('refit/commit_s', 1e3):9.2f}  {of('refit/restore_blocked_s', 1e3):10.2f}"
        f"  {of('refit/workers_committed', 1):7.0f}"
    )


# ---- The program ---------------------------------------------------------------------------------


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--workers", type=positive, default=2, help="rollout worker processes (2)")
    add("--cycles", type=positive, default=CYCLES, help="refit, roll out, train (200)")
    add("--seed", type=int, default=1, help="of the weights and of all sampling (1)")
    add("--ppo", action="store_true", help="PPO with a value head instead of GRPO")
    add("--width", type=width, default=Size().width, help="of the policy (64)")
    add("--layers", type=positive, default=Size().layers, help="of the policy (2)")
    add("--learning-rate", type=rate, default=LEARNING_RATE, help="AdamW's, at first (2e-3)")
    add("--from", type=Path, dest="start", metavar="FILE", help="weights of an earlier checkpoint")
    add("--target", type=float, help="mean of the last 10 cycles, or status 1 (0.9 of a long run)")
    add("--states", choices=("cycle", "host"), default="cycle", help="where they live (cycle)")
    add("--window-bytes", default="256KiB", help="of a window, with --states host (256KiB)")
    add("--host-fraction", type=float, default=0.0, help="share that the CPU steps (none)")
    add("--park", action="store_true", help="the policy's weights leave with the states")
    add("--activations", action="store_true", help="leave the device until the backward pass")
    add("--activation-bytes", default="16MiB", help="host memory for them (16MiB)")
    add("--check", action="store_true", help="train with and without refit, and compare all bits")
    add("--config", default=None, help="refit's configuration, as in configs/grpo.yaml")
    add("--json", type=Path, default=None, help="one object a cycle, with all figures of refit")
    add("--save-every", type=int, default=0, help="cycles between checkpoints (0: none)")
    add("--save-dir", type=Path, default=Path("checkpoints"), help="where they go (checkpoints)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def width(text: str) -> int:
    number = positive(text)
    if number % HEADS:
        raise argparse.ArgumentTypeError(f"{number} cannot be shared by {HEADS} heads")
    return number


def rate(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{number:g} is not between 0 and 1")
    return number


def check(options: argparse.Namespace) -> int:
    """Whether refit changes nothing but where the states are meanwhile."""
    with Show(options.cycles, options.json, quiet=True) as show:
        refitted = train(options, show)
    plain = train_without_refit(options)
    same = {
        "losses": refitted.losses == plain.losses,
        "rewards": refitted.rewards == plain.rewards,
        "weights": all(map(torch.equal, refitted.weights.values(), plain.weights.values())),
        "states": all(map(torch.equal, refitted.states, plain.states)),
    }
    print(f"{options.cycles} cycles with refit and without, compared bit for bit:")
    for what, equal in same.items():
        print(f"  {what:8} {'identical' if equal else 'DIFFERENT'}")
    print("".join(f"{line}\n" for line in refitted.pictures), end="")
    return 0 if all(same.values()) else 1


def run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    with Show(options.cycles, options.json) as show:
        result = train(options, show)
    rewards = result.rewards
    print("".join(f"{line}\n" for line in result.pictures), end="")
    last = rewards[-10:]
    reached = sum(last) / len(last) / REWARD_MOST
    print(
        f"\n{len(rewards)} cycles in {time.monotonic() - began:.1f} s; reward {rewards[0]:.3f} -> "
        f"{reached * REWARD_MOST:.3f} of {REWARD_MOST} (mean of the last {len(last)}): ",
        end="",
    )
    return judge(reached, options)


def judge(reached: float, options: argparse.Namespace) -> int:
    """The program's status, said. A run that cannot get there is not held against the target."""
    target = TARGET if options.target is None else options.target
    if options.target is None and options.cycles < CYCLES:
        print(f"too short for the target of {target:.2f}, which takes {CYCLES} cycles")
        return 0
    good = reached >= target
    print(f"target {target:.2f} {'reached' if good else 'NOT reached'}")
    return 0 if good else 1


def main() -> int:
    options = read_options()
    be_deterministic()
    try:
        if options.save_every:
            require_safetensors()
        return check(options) if options.check else run(options)
    except KeyboardInterrupt:
        return 130  # the fleet has ended the workers already
    except (RefitError, WorkerLost, CheckpointError) as why:
        print(f"grpo: {why}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
