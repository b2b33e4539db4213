"""What `bench step` found: the bars it is held to, and its tables."""

from __future__ import annotations

from typing import Any

from forebay.engine.gpu_report import where

FLOOR_BARS = {1: 0.5, 64: 0.4}  # batch -> share of a decode step that its bytes take at the speed of a copy
GROWTH_BARS = {1: 1.25, 8: 1.5}  # batch -> step at the longest context against the shortest
KERNEL_BARS = {"decode": 11, "prefill": 15}  # of a Reuse layer
PREFILL_BAR = 0.3  # of the bf16 peak, active FLOPs
HOST_BAR_S = 0.3e-3
GRAPH_BAR = 0.0  # between a captured step's logits and those of the same kernels over the same inputs, launched one by one
HIDDEN = 0.02  # share of a step that may show of the host's time while it counts as hidden


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for every bar that something was measured for: name, value, the bar as text, and whether it is met."""
    found: list[dict[str, Any]] = []

    def add(name: str, value: str, bar: str, met: bool) -> None:
        found.append({"name": name, "value": value, "bar": bar, "met": met})

    steps: list[dict[str, Any]] = figures["steps"]
    for row in steps:
        name, least = f"decode, batch {row['batch']}, context {row['context']:,}", FLOOR_BARS.get(row["batch"])
        if least is not None:
            add(f"{name}: share of the bytes floor", f"{row['fraction']:.1%}", f"≥ {least:.0%}", row["fraction"] >= least)
        hidden = row["exposed_s"] <= HIDDEN * row["device_s"]
        text = f"{row['host_s'] * 1e3:.3f} ms, {'hidden' if hidden else 'not hidden'}"
        add(f"{name}: host time to launch it", text, f"≤ {HOST_BAR_S * 1e3:g} ms or hidden", hidden or row["host_s"] <= HOST_BAR_S)
    if steps:
        distances = [row["graph_distance"] for row in steps]
        met = all(distance <= GRAPH_BAR for distance in distances)  # a NaN is not
        worst = next((d for d in distances if d != d), max(distances))
        add("captured decode steps: logits' distance from the same step uncaptured, at most", f"{worst:.2g}", f"≤ {GRAPH_BAR:g}", met)
    for batch, most in GROWTH_BARS.items():
        by_context = {row["context"]: row["device_s"] for row in steps if row["batch"] == batch}
        if len(by_context) > 1:
            first, last = min(by_context), max(by_context)
            ratio = by_context[last] / by_context[first]
            add(f"decode, batch {batch}: step at {last:,} against {first:,}", f"{ratio:.3f}", f"≤ {most:g}", ratio <= most)
    for row in figures["launches"]:
        plain, last, most = row["roles"].get("reuse"), row["roles"].get("reuse at the end"), KERNEL_BARS[row["work"]]
        if plain or last:
            counts = (plain or last)["kernels"]
            name = f"kernels of a Reuse layer, {row['work']} of {row['rows']:,} rows at {row['context']:,}"
            value = " to ".join(map(str, sorted({counts[0], counts[-1]})))
            if plain and last:
                value += f" ({last['kernels'][-1]} at the end of a half)"
            if beside := (plain or last).get("copies"):
                value += f", and up to {beside} copies or fills"
            add(name, value, f"≤ {most}", counts[-1] <= most)
    if figures["prefill"]:
        best = max(figures["prefill"], key=lambda row: row["fraction"])
        name = f"prefill of {best['tokens']:,} tokens in chunks of {best['chunk']:,}: share of the bf16 peak"
        add(name, f"{best['fraction']:.1%}", f"≥ {PREFILL_BAR:.0%}", best["fraction"] >= PREFILL_BAR)
    if memory := figures["memory"]:
        wanted = memory["bytes_per_token_of_layout"]
        add("KV bytes a token as allocated", f"{memory['bytes_per_token']:g}", f"{wanted:g}", memory["bytes_per_token"] == wanted)
        for work, growth in memory["growth"].items():
            bar = f"< {memory['wide'] / 1e6:,.0f} MB, the smallest bf16 copy of a source"
            add(f"working memory that a long context adds, {work}", f"{growth / 1e6:,.1f} MB", bar, growth < memory["wide"])
    return found


def markdown(figures: dict[str, Any]) -> str:
    """Tables of everything that was measured; times in milliseconds."""
    lines = [
        where(figures),
        "",
        f"{figures['model']}. Floors: bytes at the speed of a copy, which reading alone can exceed.",
        "",
    ]
    if figures["steps"]:
        lines += [
            "| batch | context | step, ms | floor, ms | floor / step | host, ms | one ahead, ms | waited, ms | tokens/s | experts, layer |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in figures["steps"]:
            times = " | ".join(f"{row[name] * 1e3:.3f}" for name in ("device_s", "floor_s"))
            host = " | ".join(f"{row[name] * 1e3:.3f}" for name in ("host_s", "ahead_s", "alone_s"))
            experts = sum(row["experts"]) / len(row["experts"])
            head = f"| {row['batch']} | {row['context']:,} | {times} | {row['fraction']:.1%} | {host} |"
            lines.append(f"{head} {row['tokens_per_s']:,.0f} | {experts:.1f} |")
        lines.append("")
    if figures["launches"]:
        lines += [
            "| work | rows | context | kernels | busy, ms | of a Reuse layer | of other layers |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        for row in figures["launches"]:
            roles = {name: "–".join(map(str, sorted({r["kernels"][0], r["kernels"][-1]}))) for name, r in row["roles"].items()}
            others = ", ".join(f"{name} {count}" for name, count in roles.items() if name != "reuse")
            head = f"| {row['work']} | {row['rows']:,} | {row['context']:,} | {row['kernels']} | {row['kernel_s'] * 1e3:.3f} |"
            lines.append(f"{head} {roles.get('reuse', '')} | {others} |")
        lines.append("")
    if figures["prefill"]:
        lines += ["| prompt | chunk | seconds | tokens/s | TFLOP/s | of bf16 peak |", "|---:|---:|---:|---:|---:|---:|"]
        for row in figures["prefill"]:
            rate = f"{row['flops_per_s'] / 1e12:.0f} | {row['fraction']:.1%}"
            lines.append(f"| {row['tokens']:,} | {row['chunk']:,} | {row['seconds']:.3f} | {row['tokens_per_s']:,.0f} | {rate} |")
        lines.append("")
    if memory := figures["memory"]:
        sizes = ", ".join(f"{name.replace('_', ' ')} {memory[name] / 1e9:.2f} GB" for name in ("weights", "blocks", "windows", "at_rest"))
        lines += [f"Memory: {sizes}; {memory['bytes_per_token']:g} bytes a token in blocks.", ""]
        lines += ["| work | rows | context | peak, GB | above weights and pools, MB | ms |", "|---|---:|---:|---:|---:|---:|"]
        for row in memory["works"]:
            ms = "" if row["seconds"] is None else f"{row['seconds'] * 1e3:.1f}"
            size = f"{row['peak'] / 1e9:.2f} | {row['above'] / 1e6:,.0f}"
            lines.append(f"| {row['work']} | {row['rows']:,} | {row['context']:,} | {size} | {ms} |")
        lines.append("")
    if compared := figures["compared"]:
        lines += [f"{compared['layers']} layers of {compared['experts']} experts:", ""]
        lines += ["| work | torch operations, ms | kernels, ms | ratio |", "|---|---:|---:|---:|"]
        for what, name in (("prefill", f"prefill of {compared['tokens']:,} tokens"), ("decode", f"decode step at {compared['tokens']:,}")):
            times = " | ".join(f"{compared[f'{way}_{what}_s'] * 1e3:.2f}" for way in ("torch", "kernels"))
            lines.append(f"| {name} | {times} | {compared[f'{what}_ratio']:.1f} |")
        lines.append("")
    if judged := bars(figures):
        lines += ["| bar | measured | wanted | |", "|---|---:|---:|---|"]
        lines += [f"| {row['name']} | {row['value']} | {row['bar']} | {'met' if row['met'] else '**missed**'} |" for row in judged]
        lines.append("")
    lines += [f"failed: {name}: {text}" for name, text in figures["errors"].items()]
    return "\n".join(lines).rstrip("\n") + "\n"


def busiest(figures: dict[str, Any], rows: int) -> str:
    """Time by kernel of everything in `launches`, and the kernels of one Reuse layer in order; microseconds."""
    lines = []
    for found in figures["launches"]:
        lines += [
            "",
            f"{found['work']} of {found['rows']:,} at {found['context']:,}: {found['kernel_s'] * 1e6:,.0f} us, {found['kernels']} kernels",
        ]
        for row in found["names"][:rows]:
            lines.append(f"  {row['seconds'] * 1e6:10.1f} us  {row['count']:5}  {row['name']}")
        by_role = ", ".join(f"{name} {r['seconds'] / r['layers'] * 1e6:.0f} us" for name, r in found["roles"].items())
        lines.append(f"  a layer: {by_role}")
        lines.append("  a Reuse layer: " + ", ".join(f"{k['name'][:40]} {k['seconds'] * 1e6:.1f}" for k in found["reuse"]))
    return "\n".join(lines).lstrip("\n")
