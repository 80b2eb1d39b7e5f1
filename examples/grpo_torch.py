#!/usr/bin/env python3
"""GRPO (and PPO) in plain PyTorch with refit in the loop: the file to copy from.

One trainer process and some rollout workers teach a small transformer to add two digits. In each
cycle

    refit      the optimizer's states leave the device, and all workers switch to the new weights
    roll out   workers sample answers; meanwhile the device's memory is free for an inference engine
    restore    the states start to come back; the objective and the backward pass do not need them
    step       waits for them by itself

Read `train` for the trainer's end and `work` for the workers'. What is not about refit (policy,
objectives, processes, output) is in grpo_torch_parts/.
"""

import argparse
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import refit
import torch
from grpo_torch_parts import checkpoint, fleet, learner
from grpo_torch_parts.fleet import Fleet, WorkerLost
from grpo_torch_parts.policy import HEADS, Batch, Policy, Size, roll_out
from grpo_torch_parts.show import Show
from grpo_torch_parts.task import REWARD_MOST
from refit.errors import DeadlineError, PeerError, RefitError

EPOCHS = 2
MINIBATCHES = 4
LEARNING_RATE = 2e-3
ENTROPY = 0.02
TRIES = 4
CYCLES, TARGET = 200, 0.9
WORKERS_TIMEOUT_S = 120.0


class Result(NamedTuple):
    """What a run has come to."""

    rewards: list[float]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: list[torch.Tensor]


# ---- The worker's end ----------------------------------------------------------------------------


def work(size: Size, endpoint: str, worker: int, seed: int, pipe: Connection) -> None:
    """A rollout worker: takes each version, loads it, and samples from it."""
    fleet.obey_the_trainer()
    be_deterministic()
    policy = Policy(size)
    with refit.Subscriber(endpoint, worker=f"rollout-{worker}") as subscriber:
        for update in fleet.versions(subscriber):  # whole, verified, committed versions only
            with update:  # accepted at its end; refused if loading fails
                update.load_into(policy)
                version = update.version
            fleet.send_batch(pipe, roll_out(policy, seed, version, worker))


# ---- The trainer's end ---------------------------------------------------------------------------


def train(options: argparse.Namespace, show: Show) -> Result:
    """The loop, with refit."""
    policy, optimizer = make_policy(options)
    result = Result([], [], {}, [])
    worker = partial(work, size_of(options))
    with (
        refit.Publisher("user://*", options.config) as publisher,
        refit.Controller(optimizer, policy, options.config) as controller,
        Fleet(options.workers, worker, publisher.endpoint, options.seed) as workers,
    ):
        publisher.wait_workers(options.workers, WORKERS_TIMEOUT_S)
        for cycle in range(1, options.cycles + 1):
            version = refit_workers(controller, publisher, workers, policy)
            batches = workers.gather(version)
            controller.restore()  # the copies run behind what follows; optimizer.step() waits
            loss = update_policy(policy, optimizer, batches, cycle, options)
            result.losses.append(loss)
            result.rewards.append(mean_reward(batches))
            show.cycle(cycle, version, result.rewards[-1], loss, controller.stats())
            if options.save_every and cycle % options.save_every == 0:
                save(controller, policy, cycle, options.save_dir)
    return finished(result, policy, optimizer)


def refit_workers(
    controller: refit.Controller, publisher: refit.Publisher, workers: Fleet, policy: Policy
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
            workers.repair()
            publisher.wait_workers(workers.count, WORKERS_TIMEOUT_S)
            if publisher.version != before:
                return publisher.version  # the others have it, and who is new is brought to it
    raise WorkerLost(f"the workers did not hold in {TRIES} tries")


def without_critic(name: str) -> str | None:
    """Workers have no use for the value head."""
    return None if name.startswith("value.") else name


def save(controller: refit.Controller, policy: Policy, cycle: int, folder: Path) -> None:
    """A checkpoint. The states can be read wherever they are, and nothing tears them meanwhile."""
    with controller.checkpoint() as states:
        checkpoint.write(folder, cycle, policy, states)


# ---- What is the same without refit --------------------------------------------------------------


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    cycle: int,
    options: argparse.Namespace,
) -> float:
    """Some passes over what the workers sampled; the last one's loss."""
    ahead = left(cycle, options)
    optimizer.param_groups[0]["lr"] = options.learning_rate * ahead
    ppo = policy.value is not None
    samples = learner.ppo_samples(policy, batches) if ppo else learner.grpo_samples(batches)
    for _ in range(EPOCHS):
        for part in learner.shuffled(samples, MINIBATCHES):
            loss = learner.objective(policy, part, ENTROPY * ahead)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    return loss.item()


def left(cycle: int, options: argparse.Namespace) -> float:
    """How much there is still to learn, and to try: from 1 down to a tenth."""
    return max(0.1, 1.0 - cycle / options.cycles)


def make_policy(options: argparse.Namespace) -> tuple[Policy, torch.optim.Optimizer]:
    """Both runs of --check begin with the same bits."""
    torch.manual_seed(options.seed)
    policy = Policy(size_of(options), critic=options.ppo)
    if options.start:
        checkpoint.load_weights(options.start, policy)
    rate = options.learning_rate
    return policy, torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.95))


def size_of(options: argparse.Namespace) -> Size:
    return Size(options.width, options.layers)


def train_without_refit(options: argparse.Namespace) -> Result:
    """What --check compares with: one process, states that never leave, no weights sent."""
    policy, optimizer = make_policy(options)
    result = Result([], [], {}, [])
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
    states = [one for state in optimizer.state.values() for one in state.values()]
    return result._replace(weights=weights, states=[one.clone() for one in states])


def be_deterministic() -> None:
    """The same bits in each run and in each process."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


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
    return 0 if all(same.values()) else 1


def run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    with Show(options.cycles, options.json) as show:
        rewards = train(options, show).rewards
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
            checkpoint.require_safetensors()
        return check(options) if options.check else run(options)
    except KeyboardInterrupt:
        return 130  # the workers are gone: the fleet ends them on its way out
    except (RefitError, WorkerLost, checkpoint.CheckpointError) as why:
        print(f"grpo: {why}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
