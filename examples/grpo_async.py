#!/usr/bin/env python3
"""GRPO that generates and trains at the same time: rollouts are up to a few versions old.

grpo_torch.py takes turns: workers sample while the trainer waits, and wait while it trains. Here
each worker samples without end. Before each batch it asks whether there are newer weights, and
loads them; the trainer takes the batches as they come, steps, and publishes without waiting until
workers have loaded what it sent:

    trainer   publish(wait="staged")  take a batch of each worker  step  publish ...
    worker    poll()  load, if there is something  sample  send the batch  poll() ...

`broadcast.max_behind` bounds how old a worker's weights may be, and the objective corrects for the
difference by its ratio: each token's probability is that of the weights that chose it.

Read `train` for the trainer's end and `work` for the workers'. The rest is grpo_torch.py's.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import grpo_torch as grpo
import refit
from grpo_torch_model import REWARD_MOST, Policy, Size, roll_out
from refit.errors import DeadlineError, PeerError, RefitError

MAX_LAG = 2
EVERY = 10
HEADER = "cycle  version  reward     loss  oldest  publish ms  waited ms"


# ---- The worker's end ----------------------------------------------------------------------------


def work(size: Size, endpoint: str, worker: int, seed: int, pipe: Connection) -> None:
    """Samples batch after batch, each from the newest version that is there."""
    grpo.obey_the_trainer()
    grpo.be_deterministic()
    policy, version, count = Policy(size), 0, 0
    with refit.Subscriber(endpoint, worker=f"rollout-{worker}") as subscriber:
        update = next(grpo.versions(subscriber), None)  # the first one is waited for
        while update is not None or version > 0:
            if update is not None:
                with update:
                    update.load_into(policy)
                    version = update.version
            count += 1
            batch = roll_out(policy, seed, count, worker)
            try:
                grpo.send_batch(pipe, batch._replace(version=version))
            except BrokenPipeError:
                return  # the trainer is gone
            update = subscriber.poll()  # between two batches; None: nothing newer


# ---- The trainer's end ---------------------------------------------------------------------------


class Cycle(NamedTuple):
    """What is shown of one."""

    cycle: int
    version: int
    reward: float
    loss: float
    oldest: int
    publish_ms: float
    waited_ms: float


def train(options: argparse.Namespace) -> Iterable[Cycle]:
    """The loop; what each cycle was like."""
    policy, optimizer = grpo.make_policy(options)
    worker = partial(work, grpo.size_of(options))
    with (
        refit.Publisher(
            "user://*", broadcast_wait="staged", broadcast_max_behind=options.max_lag
        ) as publisher,
        grpo.Fleet(options.workers, worker, publisher.endpoint, options.seed) as workers,
    ):
        publisher.wait_workers(options.workers, grpo.WORKERS_TIMEOUT_S)
        for cycle in range(1, options.cycles + 1):
            began = time.perf_counter()
            version = publish(publisher, workers, policy)
            published = time.perf_counter()
            batches = workers.gather(version - options.max_lag)  # older ones are dropped
            waited = time.perf_counter()
            loss = grpo.update_policy(policy, optimizer, batches, cycle, options)
            yield Cycle(
                cycle,
                version,
                grpo.mean_reward(batches),
                loss,
                version - min(batch.version for batch in batches),
                1e3 * (published - began),
                1e3 * (waited - published),
            )


def publish(publisher: refit.Publisher, workers: grpo.Fleet, policy: Policy) -> int:
    """Returns when all workers have the version, whatever they do. One that died is replaced."""
    before = publisher.version
    for _ in range(grpo.TRIES):
        try:
            return publisher.publish(refit.named_weights(policy))
        except (PeerError, DeadlineError) as why:
            print(f"grpo: {why}", file=sys.stderr)
            grpo.replace_lost_workers(publisher, workers)
            if publisher.version != before:
                return publisher.version
    raise grpo.WorkerLost(f"the workers did not hold in {grpo.TRIES} tries")


# ---- The program ---------------------------------------------------------------------------------


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--workers", type=grpo.positive, default=2, help="rollout worker processes (2)")
    add("--cycles", type=grpo.positive, default=grpo.CYCLES, help="steps of the trainer (200)")
    add("--max-lag", type=grpo.positive, default=MAX_LAG, help="versions, of a worker's (2)")
    add("--seed", type=int, default=1, help="of the weights and of all sampling (1)")
    add("--target", type=float, help="mean of the last 10 cycles, or status 1 (0.9 of a long run)")
    add("--json", type=Path, default=None, help="one object a cycle")
    options = parser.parse_args(arguments)
    size = Size()
    usual = {"width": size.width, "layers": size.layers, "ppo": False, "start": None}
    vars(options).update(usual, learning_rate=grpo.LEARNING_RATE)
    return options


def run(options: argparse.Namespace) -> int:
    began, cycles = time.monotonic(), []
    print(HEADER)
    for it in train(options):
        cycles.append(it)
        if it.cycle % EVERY == 0 or it.cycle in (1, options.cycles):
            print(
                f"{it.cycle:5}  {it.version:7}  {it.reward:6.3f}  {it.loss:7.4f}  {it.oldest:6}  "
                f"{it.publish_ms:10.2f}  {it.waited_ms:9.2f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text("".join(json.dumps(it._asdict()) + "\n" for it in cycles))
    last = [it.reward for it in cycles[-EVERY:]]
    reached = sum(last) / len(last) / REWARD_MOST
    print(
        f"\n{len(cycles)} cycles in {time.monotonic() - began:.1f} s; reward "
        f"{cycles[0].reward:.3f} -> {reached * REWARD_MOST:.3f} of {REWARD_MOST} (mean of the last "
        f"{len(last)}): ",
        end="",
    )
    return grpo.judge(reached, options)


def main() -> int:
    options = read_options()
    grpo.be_deterministic()
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130  # the fleet has ended the workers already
    except (RefitError, grpo.WorkerLost) as why:
        print(f"grpo: {why}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
