"""Injects each of several faults several times and prints a table of the results."""


def run_all(names, runs, one):
    """Runs `one(name)` `runs(name)` times for each name. Prints one line per failed run, and the table.

    `one` returns (rank at fault, list of errors, seconds until all ranks were notified, seconds until all processes had
    ended); a time of None does not apply. Returns the number of failed runs.
    """
    bad, table = 0, []
    for name in names:
        good, reported, ended = 0, [], []
        for number in range(runs(name)):
            victim, wrong, reported_s, ended_s = one(name)
            good += not wrong
            reported += [reported_s] if reported_s is not None else []
            ended += [ended_s] if ended_s is not None else []
            if wrong:
                print(f"{name} {number}, rank {victim}: {'; '.join(wrong)}", flush=True)
        bad += runs(name) - good
        table.append(f"{name:9} {good:4} of {runs(name):<4} {format_max(reported)}  {format_max(ended)}")
        print(table[-1], flush=True)
    print("\nfault      passed        notified max  ended max\n" + "\n".join(table))
    return bad


def format_max(values):
    return f"{max(values):8.2f} s" if values else "       -  "
