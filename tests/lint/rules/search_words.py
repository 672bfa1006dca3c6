"""Words that people search for lead to a page: each stands in a heading, or in a line "Also called: ..." of a page."""

from source_tree import Finding

WORDS = (
    "horovodrun",
    "torch.distributed.launch",
    "mp.spawn",
    "DistributedSampler",
    "set_epoch",
    "init_process_group",
    "model.module",
    "find_unused_parameters",
    "broadcast_buffers",
    "static_graph",
    "SyncBatchNorm",
    "amp.initialize",
    "O1",
    "scale_loss",
    "GradScaler",
    "backward_passes_per_step",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "EnforceNotMet",
    "unhandled cuda error",
    "unhandled system error",
    "orted",
    "ORTE",
    "tqdm",
    "GIL",
    "SlurmCluster",
    "sbatch",
    "local_rank",
    "no_sync",
    "gigabit",
)


def check(tree):
    pages = [page for page in tree.paths(ends=(".md",)) if page.startswith("docs/") and "/zh/" not in page]
    text = "\n".join(line for page in pages for line in signposts(tree.lines(page)))
    for word in WORDS if pages else ():
        if word not in text:
            yield Finding("docs/README.md", 1, f'no heading and no line "Also called:" has the word {word}')


def signposts(lines):
    """Yields the headings, and the paragraphs that begin with "Also called:"."""
    fence = inside = False
    for line in lines:
        fence ^= line.startswith("```")
        inside = bool(line) and (inside or line.startswith("Also called:"))
        if inside or (not fence and line.startswith("#")):
            yield line


SAMPLE = {
    "docs/README.md": "# Documentation @flag\nAlso called: "
    + " ".join(WORDS[:20])
    + "\nand "
    + " ".join(WORDS[20:-1])
    + "\n\ngigabit\n```\n# gigabit\n```\n",
}
