"""Results as tables for people, in the Markdown that a document takes: one row for each way."""

from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they must be, the first one left, the others right."""
    cells = [list(heads), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = ["| " + " | ".join(map(_pad, row, widths, range(len(row)))) + " |" for row in cells]
    rule = "|" + "|".join(
        "-" * (width + 1) + (":" if at else "-") for at, width in enumerate(widths)
    )
    return "\n".join([lines[0], rule + "|", *lines[1:]]) + "\n"


def _pad(text: str, width: int, column: int) -> str:
    return text.rjust(width) if column else text.ljust(width)


def offload(result: Result) -> str:
    """Both modes, one after the other."""
    head = (
        f"offload: {result['tensors']} states of AdamW, {result['parameters'] / 1e9:.2f} B "
        f"parameters, {result['bytes'] / 1e9:.2f} GB, {result['rounds']} rounds{_short(result)}\n\n"
    )
    heads = (
        "storages", "way", "out", "back", "cycle median", "p95", "first cycle", "GB/s out",
        "GB/s back", "time over refit's", "allocations", "new pages", "peak host memory",
    )  # fmt: skip
    return head + table(
        heads,
        (_offload_row(mode, row) for mode, rows in result["storages"].items() for row in rows),
    )


def _offload_row(mode: str, row: Result) -> list[str]:
    return [
        mode,
        row["way"],
        _seconds(row["out_seconds_median"]),
        _seconds(row["back_seconds_median"]),
        _seconds(row["cycle_seconds_median"]),
        _seconds(row["cycle_seconds_p95"]),
        _seconds(row["cold_out_seconds"] + row["cold_back_seconds"]),
        f"{row['offload_gbps']:.1f}",
        f"{row['restore_gbps']:.1f}",
        f"{row['refit_speedup']:.2f}",
        str(row["allocations_per_cycle"]),
        str(row["page_faults_per_cycle"]),
        f"{row['peak_host_bytes'] / 1e9:.2f} GB",
    ]


def gpu_offload(result: Result) -> str:
    """One row for each way."""
    head = (
        f"offload: {result['tensors']} states of AdamW, {result['bytes'] / 1e9:.2f} GB, on "
        f"{result['device']}, {result['rounds']} rounds; the passes of a step take "
        f"{_seconds(result['passes_seconds_median'])}\n\n"
    )
    heads = (
        "way", "out", "p95", "back", "p95", "first out", "a step waits", "time over refit's",
        "given back", "host memory",
    )  # fmt: skip
    rows = table(heads, (_gpu_offload_row(row) for row in result["ways"]))
    return head + rows + _left_out(result)


def _left_out(result: Result) -> str:
    """A line for each way that is not on this machine."""
    lines = [f"{name} is left out: {why}\n" for name, why in result["left_out"].items()]
    return "\n" + "".join(lines) if lines else ""


def _gpu_offload_row(row: Result) -> list[str]:
    return [
        row["way"],
        _seconds(row["out_seconds_median"]),
        _seconds(row["out_seconds_p95"]),
        _seconds(row["back_seconds_median"]),
        _seconds(row["back_seconds_p95"]),
        _seconds(row["cold_out_seconds"]),
        _seconds(row["step_waits_seconds"]),
        f"{row['over_refit']:.2f}",
        f"{row['device_bytes_given_back'] / 1e9:.2f} GB",
        f"{row['host_bytes'] / 1e9:.2f} GB",
    ]


def weights(result: Result) -> str:
    """One row for each way and number of workers."""
    head = (
        f"weights: {result['tensors']} bf16 tensors, {result['bytes'] / 1e6:.0f} MB, to worker "
        f"processes, {result['rounds']} rounds{_short(result)}\n\n"
    )
    heads = (
        "workers", "way", "version whole", "p95", "first version", "GB/s a worker",
        "time over refit's", "and loaded", "time over refit's",
    )  # fmt: skip
    return head + table(heads, (_weights_row(row) for row in result["ways"]))


def _weights_row(row: Result) -> list[str]:
    return [
        str(row["workers"]),
        row["way"],
        _seconds(row["seconds_median"]),
        _seconds(row["seconds_p95"]),
        _seconds(row["cold_seconds"]),
        f"{row['gbps_per_worker']:.2f}",
        f"{row['refit_speedup']:.2f}",
        _seconds(row["loaded_seconds_median"]),
        f"{row['loaded_refit_speedup']:.2f}",
    ]


def gpu_weights(result: Result) -> str:
    """One row for each way."""
    head = (
        f"weights: {result['tensors']} bf16 tensors, {result['bytes'] / 1e6:.0f} MB, to an engine "
        f"process on {result['device']}, {result['rounds']} rounds\n\n"
    )
    heads = ("way", "loaded", "p95", "first version", "GB/s", "over handles", "more device MiB")
    return head + table(heads, (_gpu_weights_row(row) for row in result["ways"]))


def _gpu_weights_row(row: Result) -> list[str]:
    return [
        row["way"],
        _seconds(row["seconds_median"]),
        _seconds(row["seconds_p95"]),
        _seconds(row["cold_seconds"]),
        f"{row['gbps']:.2f}",
        f"{row['over_handles']:.2f}",
        f"{row['device_bytes'] / (1 << 20):.0f}",
    ]


def async_weights(result: Result) -> str:
    """One row for each transport and way."""
    head = (
        f"async_weights: {result['bytes'] / 1e6:.0f} MB of bf16 weights to a worker that asks for "
        f"the next version {result['generates_s']:g} s after it has one, {result['rounds']} "
        "rounds\n\n"
    )
    heads = (
        "transport", "wait", "publish takes", "p95", "first version", "over no worker", "evicted",
        "aborted",
    )  # fmt: skip
    return head + table(heads, (_async_weights_row(row) for row in result["ways"]))


def _async_weights_row(row: Result) -> list[str]:
    return [
        row["transport"],
        row["way"],
        _seconds(row["seconds_median"]),
        _seconds(row["seconds_p95"]),
        _seconds(row["cold_seconds"]),
        f"{row['over_no_worker']:.2f}",
        str(row["evicted"]),
        str(row["aborted"]),
    ]


def scale(result: Result) -> str:
    """One row for each number of workers and of hosts."""
    head = (
        f"scale: {result['bytes'] / 1e6:.0f} MB of bf16 weights to workers on other hosts, "
        f"{result['rounds']} rounds; bytes and memory of all workers are in units of the "
        "weights\n\n"
    )
    heads = (
        "workers", "hosts", "each takes", "publish takes", "p95", "first version",
        "over one worker", "sent", "memory",
    )  # fmt: skip
    return head + table(heads, (_scale_row(row) for row in result["ways"]))


def _scale_row(row: Result) -> list[str]:
    return [
        str(row["workers"]),
        str(row["hosts"]),
        "its share" if "share" in row["way"] else "all",
        _seconds(row["seconds_median"]),
        _seconds(row["seconds_p95"]),
        _seconds(row["cold_seconds"]),
        f"{row['over_one_worker']:.2f}",
        f"{row['sent']:.2f}",
        f"{row['images']:.2f}",
    ]


def scale_publishers(result: Result) -> str:
    """One row for each number of publishers."""
    head = (
        f"scale: {result['bytes'] / 1e6:.0f} MB of bf16 weights from several publishers to one "
        f"worker, the link of each is {result['link']}, {result['rounds']} rounds; what each sends "
        "is in units of the weights\n\n"
    )
    heads = (
        "publishers", "publish takes", "p95", "first version", "speed-up over the first row",
        "each sends",
    )  # fmt: skip
    return head + table(heads, (_publishers_row(row) for row in result["ways"]))


def _publishers_row(row: Result) -> list[str]:
    least, most = f"{row['sent_least']:.2f}", f"{row['sent_most']:.2f}"
    return [
        str(row["publishers"]),
        _seconds(row["seconds_median"]),
        _seconds(row["seconds_p95"]),
        _seconds(row["cold_seconds"]),
        f"{row['speedup']:.2f}",
        least if least == most else f"{least} to {most}",
    ]


def window(result: Result) -> str:
    """One row for each way."""
    head = (
        f"window: {result['tensors']} states of AdamW on the host, {result['bytes'] / 1e9:.2f} GB, "
        f"{result['rounds']} rounds{_short(result)}; copies alone take "
        f"{_seconds(result['copies_in_seconds_median'])} in and "
        f"{_seconds(result['copies_out_seconds_median'])} out\n\n"
    )
    heads = (
        "way", "step median", "p95", "first step", "blocked", "over its longest part",
        "speed-up over no overlap", "in", "out", "windows", "peak of states on the device",
    )  # fmt: skip
    return head + table(heads, (_window_row(row) for row in result["ways"]))


def _window_row(row: Result) -> list[str]:
    sizes = (row[name] for name in ("in_bytes", "out_bytes", "window_bytes", "peak_device_bytes"))
    return [
        row["way"],
        _seconds(row["step_s_median"]),
        _seconds(row["step_s_p95"]),
        _seconds(row["cold_step_s"]),
        _seconds(row["blocked_s"]),
        f"{row['overlap']:.2f}",
        f"{row['speedup_over_no_overlap']:.2f}",
        *(f"{size / 1e6:.0f} MB" for size in sizes),
    ]


def host_step(result: Result) -> str:
    """One row for each way; steps of more tensors at its end."""
    head = (
        f"host_step: {result['parameters'] / 1e6:.1f} M fp32 parameters, {result['threads']} "
        f"threads, {result['rounds']} rounds{_short(result)}\n\n"
    )
    counts = list(dict.fromkeys(row["tensors"] for row in result["ways"]))
    heads = (
        f"way, of {counts[0]} tensors", "step", "p95", "first step", "M parameters/s",
        "of the memory's limit", "speed-up over the for-loop",
        "over the faster of fused and DeepSpeed", "elements with other bits",
        *(f"step of {count:,}" for count in counts[1:]),
    )  # fmt: skip
    by_way: dict[str, dict[int, Result]] = {}
    for row in result["ways"]:
        by_way.setdefault(row["way"], {})[row["tensors"]] = row
    return head + table(heads, (_host_step_row(rows, counts) for rows in by_way.values()))


def _host_step_row(rows: dict[int, Result], counts: Sequence[int]) -> list[str]:
    row = rows[counts[0]]
    different = row["different_share"]
    return [
        row["way"],
        _seconds(row["step_s_median"]),
        _seconds(row["step_s_p95"]),
        _seconds(row["cold_step_s"]),
        f"{row['parameters_per_s'] / 1e6:,.0f}",
        f"{row['share_of_limit']:.2f}",
        f"{row['speedup_over_for_loop']:.2f}",
        f"{row['speedup_over_faster']:.2f}",
        "not compared" if different is None else _percent(different),
        *(_seconds(rows[one]["step_s_median"]) if one in rows else "" for one in counts[1:]),
    ]


def _percent(share: float) -> str:
    return "none" if share == 0 else f"{share * 100:.2g} %"


def host_sweep(result: Result) -> str:
    """One row for each way and share of the states on the host."""
    head = (
        f"host_sweep: a transformer of {result['parameters'] / 1e6:.1f} M parameters on "
        f"{result['device']}, {result['tokens']} tokens a step, {result['threads']} threads, "
        f"{result['rounds']} rounds{_short(result)}\n\n"
    )
    memory = "states on the device" if result["device"] == "cpu" else "peak of device memory"
    heads = (
        "way", "share on the host", "whole step median", "p95", "first step", "forward", "backward",
        "optimizer", "over no host memory", "backward and optimizer, over the longer", memory,
        "same bits",
    )  # fmt: skip
    rows = table(heads, (_host_sweep_row(row) for row in result["ways"]))
    return head + rows + _left_out(result)


def _host_sweep_row(row: Result) -> list[str]:
    times = ("step_s_median", "step_s_p95", "cold_step_s")
    phases = ("forward_s_median", "backward_s_median", "optimizer_s_median")
    return [
        row["way"],
        f"{row['host_fraction']:g}",
        *(_seconds(row[name]) for name in (*times, *phases)),
        f"{row['over_plain']:.2f}",
        f"{row['over_longer']:.2f}",
        f"{row['peak_device_bytes'] / 1e6:.0f} MB",
        "yes" if row["bit_equal"] else "no",
    ]


def activations(result: Result) -> str:
    """One row for each shape and way; below them why a way was off, and the crossovers."""
    head = (
        f"activations: forward and backward pass of a decoder of {result['parameters'] / 1e6:.1f} "
        f"M parameters, {result['layers']} layers, on {result['device']}, {result['threads']} "
        f"threads, {result['rounds']} rounds\n\n"
    )
    heads = (
        "batch x length", "way", "step median", "p95", "first step", "over none", "blocked",
        "peak", "over none's", "of the first step", "out", "back", "share of what can leave",
        "same bits",
    )  # fmt: skip
    rows = result["ways"]
    off = [f"{it['shape']}, {it['way']}: off: {it['off']}\n" for it in rows if it["off"]]
    faster = [
        f"{way}: not slower than checkpointing from "
        f"{'no shape' if tokens is None else f'{tokens} tokens'} on\n"
        for way, tokens in result["crossover"].items()
    ]
    return "\n".join((head + table(heads, map(_activations_row, rows)), "".join((*off, *faster))))


def _activations_row(row: Result) -> list[str]:
    share = row["leavable_share"]
    sizes = ("out_bytes", "back_bytes")
    return [
        row["shape"],
        row["way"],
        *(_seconds(row[name]) for name in ("step_s_median", "step_s_p95", "cold_step_s")),
        f"{row['over_none']:.2f}",
        _seconds(row["blocked_s"]),
        f"{row['peak_bytes'] / 1e6:.1f} MB",
        f"{row['peak_over_none']:.2f}",
        f"{row['cold_peak_bytes'] / 1e6:.1f} MB",
        *(f"{row[name] / 1e6:.1f} MB" for name in sizes),
        "" if share is None else f"{share:.2f}",
        "yes" if row["bit_equal"] else "no",
    ]


def overhead(result: Result) -> str:
    """One line for each figure."""
    head = f"overhead: {result['tensors']} states of 64 bytes, {result['rounds']} rounds\n\n"
    rows = [
        _overhead_row("cycle with two tensors", result, "{}_ms_with_two_tensors", "ms"),
        _overhead_row("a tensor more", result, "{}us_per_tensor", "µs"),
        ["of that: torch frees and allocates it", "", _micro(result, "in_torch_storages")],
        ["of that: refit's Python side", "", _micro(result, "in_python")],
    ]
    plans = [
        [
            f"{row['tensors']:,}",
            row["scene"],
            _median_and_p95(row, "us_per_tensor"),
            _median_and_p95(row, "processor_us_per_tensor"),
        ]
        for row in result["plans"]
    ]
    columns = "clock", "caller's processor time"
    return "\n".join(
        (
            head + table(("what", *columns), rows),
            "for each tensor that leaves: median (p95), in µs\n",
            table(("states", "what", *columns), plans),
        )
    )


def _median_and_p95(row: Result, figure: str) -> str:
    return f"{row[f'{figure}_median']:.1f} ({row[f'{figure}_p95']:.1f})"


def _overhead_row(what: str, result: Result, key: str, unit: str) -> list[str]:
    clock, busy = ("cycle", "processor") if key.startswith("{}_ms") else ("", "processor_")
    return [what, *(f"{result[key.format(one)]:.2f} {unit}" for one in (clock, busy))]


def _micro(result: Result, part: str) -> str:
    return f"{result[f'processor_us_per_tensor_{part}']:.2f} µs"


def _short(result: Result) -> str:
    return " (memory is short: smaller than was asked for)" if result["shortened"] else ""


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
