"""Faults, each of them several times, and the table of what became of them."""


def run_all(names, runs, one):
    """`one(name)`: (the rank at fault, what is wrong, seconds until all were told, seconds until all had ended; None: does not apply); `runs(name)`: how many
    times. Prints a line a run that is not good, and the table; returns how many were not good."""
    bad, table = 0, []
    for name in names:
        good, told, ended = 0, [], []
        for number in range(runs(name)):
            victim, wrong, reported_s, ended_s = one(name)
            good += not wrong
            told += [reported_s] if reported_s is not None else []
            ended += [ended_s] if ended_s is not None else []
            if wrong:
                print(f"{name} {number}, rank {victim}: {'; '.join(wrong)}", flush=True)
        bad += runs(name) - good
        table.append(f"{name:9} {good:4} of {runs(name):<4} {most(told)}  {most(ended)}")
        print(table[-1], flush=True)
    print("\nfault      good          told at most  ended at most\n" + "\n".join(table))
    return bad


def most(values):
    return f"{max(values):8.2f} s" if values else "       -  "
