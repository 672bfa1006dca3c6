"""Line and bar plots as SVG, readable on light and dark pages."""

import math

COLORS = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#cc79a7", "#009e73", "#b8a800", "#888888", "#7a5195", "#a05a2c")
STYLE = (
    "<style>text{font:12px sans-serif;fill:#333}.t{font-weight:bold;font-size:14px}"
    "rect.b{fill:#fff}.g{stroke:#ddd}</style>"
)


def svg(width, height, title, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"{STYLE}"
        f'<rect class="b" width="{width}" height="{height}"/><text class="t" x="16" y="24">{title}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def text(x, y, words, anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def bytes_text(count):
    return f"{count >> 20}M" if count % (1 << 20) == 0 else f"{count >> 10}K" if count % 1024 == 0 else str(count)


def curves(title, comparisons):
    """Plots time over size, both logarithmic, with one line per implementation."""
    left, top, width, height = 64, 48, 520, 320
    sizes = [comparison[0]["bytes"] for comparison in comparisons]
    seconds = [row["median_s"] for comparison in comparisons for row in comparison]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    span = max(math.log(max(sizes) / min(sizes)), 1e-9)
    x_of = lambda size: left + width * math.log(size / min(sizes)) / span
    y_of = lambda s: top + height * (high - math.log10(s)) / max(high - low, 1)
    body = []
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        label = {
            0: "1 s",
            -1: "100 ms",
            -2: "10 ms",
            -3: "1 ms",
            -4: "100 us",
            -5: "10 us",
            -6: "1 us",
            -7: "0.1 us",
        }.get(power, f"1e{power} s")
        body += [
            f'<line class="g" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>',
            text(left - 6, y + 4, label, "end"),
        ]
    body += [text(x_of(size), top + height + 18, bytes_text(size), "middle") for size in sizes]
    names = list(dict.fromkeys(row["impl"] for comparison in comparisons for row in comparison))
    for number, name in enumerate(names):
        points = [
            (x_of(comparison[0]["bytes"]), y_of(row["median_s"]))
            for comparison in comparisons
            for row in comparison
            if row["impl"] == name
        ]
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        y = top + 18 * number + 8
        body += [
            f'<rect x="{left + width + 24}" y="{y - 9}" width="12" height="12" fill="{color}"/>',
            text(left + width + 42, y + 1, name),
        ]
    return svg(left + width + 190, top + height + 40, title, body)


def bars(title, groups):
    """Plots the ratios of each group's rows as bars."""
    left, row_height, width, y = 190, 18, 420, 48
    longest = max(row["ratio"] for _, comparison in groups for row in comparison)
    names = list(dict.fromkeys(row["impl"] for _, comparison in groups for row in comparison))
    body = []
    for label, comparison in groups:
        body.append(f'<text x="16" y="{y + 12}" font-weight="bold">{label}</text>')
        y += row_height
        for row in comparison:
            color, length = COLORS[names.index(row["impl"]) % len(COLORS)], width * row["ratio"] / longest
            body += [
                text(left - 8, y + 12, row["impl"], "end"),
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{row_height - 4}" fill="{color}"/>',
                text(left + length + 6, y + 12, f"{row['ratio']:.2f}  ({1000 * row['median_s']:.0f} ms)"),
            ]
            y += row_height
        y += 10
    return svg(left + width + 130, y + 10, title, body)
