"""Judge what the ranks' witnesses have noted: the rows of the audit's table."""

import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, pairwise, zip_longest

from ddp_helpers.tools.audit.notes import OK, RED, UNSEEN, Notes, Row, differ, of, short, unlike

GLOO = re.compile(r"\[/\S+:\d+\] ")  # where gloo was built
# With each of these a script may bring counts together: to broadcast them in turn, or to send them, is right, too.
REDUCES = re.compile("all_|reduce|gather|broadcast|i?send|i?recv|batch_isend")
LOG = "notes/output.log has all messages; 'collectives' says whether one rank left another waiting"
FEW = 8  # steps in which random numbers are compared


def end(ranks: list[Notes]) -> tuple[str, str, str]:
    """All ranks ended by themselves, with status 0."""
    if hung := {rank: of(notes, "stands")[0] for rank, notes in enumerate(ranks) if of(notes, "stands")}:
        told = [f"rank {rank} at {short(n['at'])} in {n['doing']}" for rank, n in hung.items()]
        rest = [f"rank {rank} had ended" for rank in range(len(ranks)) if rank not in hung]
        return (
            RED,
            f"ended at the limit: {', '.join([*told, *rest])}",
            "see 'collectives'; where nothing hangs, a longer --limit",
        )
    failed = [(note, rank) for rank, notes in enumerate(ranks) for note in of(notes, "ends") if note["status"]]
    lost = [f"rank {rank} was ended by a signal" for rank, notes in enumerate(ranks) if not of(notes, "ends")]
    if failed:
        note, rank = min(failed, key=lambda each: each[0]["time"])  # the others' errors may follow from this one
        why = GLOO.sub("", note["why"])[:110] or f"exit status {note['status']}"
        path, _, line = note["at"].rpartition(":")
        why += linecache.getline(path, int(line)).strip() if why.endswith(": ") else ""  # of an assert without words
        return RED, "; ".join([f"rank {rank} at {short(note['at'])}: {why}", *lost]), LOG
    if lost:
        return RED, "; ".join(lost), LOG
    return OK, f"{len(ranks)} ranks ended with status 0", ""


def passes(notes: Notes) -> dict[tuple, Notes]:
    """The passes of a rank over its loaders, by dataset and by whether it trained."""
    found: dict[tuple, Notes] = {}
    for note in of(notes, "pass"):
        found.setdefault((note["steps"] > 0, note["whole"], note["iterable"]), []).append(note)
    return found


def together(ranks: list[Notes], training: bool) -> Iterator[list[dict]]:
    """For each pass over a dataset that all ranks made, the notes of all ranks."""
    told = [passes(notes) for notes in ranks]
    for key in told[0]:
        if key[0] == training and all(key in one for one in told):
            yield from zip(*(one[key] for one in told), strict=False)


def samples(ranks: list[Notes]) -> tuple[str, str, str]:
    """In training, no two ranks take the same samples."""
    padded, count = 0, 0
    for told in together(ranks, training=True):
        sets, at = [set(note["samples"]) for note in told], short(told[0]["begun"])
        every = Counter(sample for one in sets for sample in one)
        twice, drawn = sum(n > 1 for n in every.values()), sum(len(note["samples"]) for note in told)
        bound = len(every) / 2 if told[0]["iterable"] else len(told) - 1
        if told[0]["iterable"] and drawn >= 2 * sum(map(len, sets)) > 0:
            return RED, f"{at}: each worker of a rank gives all its samples", "share them by get_worker_info().id, too"
        if twice > bound and drawn > sum(map(len, sets)) + len(told) and not told[0]["iterable"]:
            return UNSEEN, f"{at}: samples are drawn with replacement, so shares cannot be told apart", ""
        if unlike(ranks):
            if told[0]["sampler"] != "DistributedSampler":
                return OK, f"{at}: each rank has samples of its own under the same numbers", ""
            seen = f"{at}: shares of datasets that differ: one number is another sample on each rank"
            return RED, seen, "make the same dataset on all ranks: seed before it is made, or read it from one file"
        if twice > bound:
            cure = "sampler=DistributedSampler(dataset) in the training loader, without shuffle"
            cure = "share the samples by rank" if told[0]["iterable"] else cure
            return RED, f"{at}: {twice} of {len(every)} samples were trained on by more than one rank", cure
        padded, count = max(padded, twice), count + 1
    more = f"; {padded} taken twice, to make the shares equal" if padded else ""
    none = "no training pass over a DataLoader was seen on all ranks"
    return (OK, f"each rank trained on a share of its own, {count} passes{more}", "") if count else (UNSEEN, none, "")


def order(ranks: list[Notes]) -> tuple[str, str, str]:
    """Each training pass has an order of its own."""
    seen = 0
    for key, notes in passes(ranks[0]).items():
        whole = [note for note in notes if note["batches"] > 1]
        if not key[0] or key[2] or len(whole) < 2:
            continue
        for one, other in pairwise(whole):
            least = min(len(one["samples"]), len(other["samples"]))
            if one["samples"][:least] == other["samples"][:least]:
                at, sampler = short(one["begun"]), one["sampler"]
                if sampler == "DistributedSampler" and one["shuffles"]:
                    return RED, f"{at}: two epochs had the same order", "sampler.set_epoch(epoch) before each epoch"
                return UNSEEN, f"{at}: each epoch has the same order, and {sampler} does not shuffle: meant so?", ""
        seen += len(whole)
    return (OK, f"{seen} epochs, each in another order", "") if seen else (UNSEEN, "fewer than two training epochs", "")


def evaluation(ranks: list[Notes]) -> tuple[str, str, str]:
    """In evaluation, each sample is looked at once, or all of them by each rank."""
    verdict = (UNSEEN, "no pass without steps was seen on all ranks", "")
    for told in together(ranks, training=False):
        if told[0]["iterable"] or not all(note["complete"] for note in told):
            continue
        every, at = Counter(sample for note in told for sample in note["samples"]), short(told[0]["begun"])
        sets, whole = {frozenset(note["samples"]) for note in told}, told[0]["whole"]
        stride = told[0]["samples"][1:2] == [told[0]["samples"][0] + len(ranks)] if told[0]["samples"] else False
        if len(sets) == 1 and stride:
            return RED, f"{at}: all ranks take samples 0, {len(ranks)}, … and none the rest", "begin the share at rank"
        if len(sets) == 1 and len(every) < whole:
            verdict = UNSEEN, f"{at}: all ranks test the same {len(every)} of {whole} samples: meant so?", ""
        elif len(sets) == 1:
            verdict = OK, f"{at}: each rank tests all {whole} samples (right, but the ranks share no work)", ""
        elif (twice := sum(n > 1 for n in every.values())) > 0:
            cure = "Subset(dataset, range(rank, len(dataset), world_size)) in place of a sampler that pads"
            return RED, f"{at}: {twice} of {len(every)} samples count more than once", cure
        else:
            verdict = OK, f"{at}: {len(every)} of {whole} samples, each once", ""
    return verdict


def replicas(ranks: list[Notes]) -> tuple[str, str, str]:
    """After each epoch and at the end, all ranks hold the same weights."""
    told, made = [of(notes, "weights") for notes in ranks], of(ranks[0], "wrapped")
    for several in zip(*told, strict=False):
        for rank, note in enumerate(several):
            if note["names"] == several[0]["names"] and differ(note["sums"], several[0]["sums"]):
                pairs = zip(note["names"], note["sums"], several[0]["sums"], strict=True)
                name = next(name for name, one, other in pairs if differ([one], [other]))
                when = "at the end" if note["when"] == "end" else "after an epoch"
                cure = f"see 'gradients'; the model is wrapped in {short(made[0]['at'])}"
                return RED, f"{when} rank {rank} holds another {name} than rank 0", cure
    if not all(told):
        return UNSEEN, "no model was wrapped in DistributedDataParallel", ""
    return OK, f"equal on all ranks, compared after epochs and at the end: {len(told[0])}", ""


def gradients(ranks: list[Notes]) -> tuple[str, str, str]:
    """At each step of an optimizer, all ranks hold the same gradients."""
    told, made = [of(notes, "step") for notes in ranks], of(ranks[0], "wrapped")
    if not made or not any(note["ours"] for note in told[0]):
        return UNSEEN, "no optimizer stepped the weights of a wrapped model", ""
    for number, several in enumerate(zip(*told, strict=False), 1):
        if any(differ(note["sums"], several[0]["sums"]) for note in several):
            called = several[0]["forwards"]
            why = "the wrapper was not called before it" if not called else f"the wrapper was called {called} times"
            cure = f"call what DDP() returned in {short(made[0]['at'])}, not the model inside; no no_sync() at the last"
            return RED, f"{short(several[0]['at'])}: step {number} had other gradients on each rank; {why}", cure
    if not any(size for note in told[0] for _, size in note["sums"]):
        return UNSEEN, f"all are zero at the first {len(told[0])} steps: does the loss depend on the weights?", ""
    return OK, f"equal on all ranks at the first {len(told[0])} steps", ""


def collectives(ranks: list[Notes]) -> tuple[str, str, str]:
    """All ranks call the same collectives, in the same order."""
    told, other = [of(notes, "collective") for notes in ranks], of(ranks[0], "other group")
    for number, several in enumerate(zip_longest(*told), 1):
        there = {rank: note for rank, note in enumerate(several) if note}
        gone = [r for r in range(len(ranks)) if r not in there]
        known = all(of(ranks[r], "stands") or any(n["status"] == 0 for n in of(ranks[r], "ends")) for r in gone)
        if len({(note["name"], *(note["size"] or ())) for note in there.values()}) > 1 or (gone and known):
            said = [f"rank {r} calls {n['name']} {n['size'] or ''}".strip() for r, n in there.items()]
            said = [f"{text} at {short(n['at'])}" for text, n in zip(said, there.values(), strict=True)]
            said += [f"rank {r} does not come" for r in gone]
            return RED, f"call {number}: {', '.join(said)}", "let all ranks make this call, or none: no `if rank == 0`"
        if gone:
            return UNSEEN, f"alike for {number - 1} calls; then a rank failed", ""
    more = f"; {len(other)} in other groups were not compared" if other else ""
    return (OK, f"the same {len(told[0])} calls on all ranks{more}", "") if told[0] else (UNSEEN, "none", "")


def files(ranks: list[Notes]) -> tuple[str, str, str]:
    """No two ranks write the same file."""
    told = [{note["path"]: note["at"] for note in of(notes, "wrote")} for notes in ranks]
    for path in told[0]:
        if sum(path in one for one in told) > 1:
            cure = "let one rank do it: if rank == 0 (the others wait in a barrier, if they need the file)"
            return RED, f"{short(told[0][path])}: several ranks write {path.rpartition('/')[2]}", cure
    return (OK, "none was written by more than one rank", "") if any(told) else (UNSEEN, "none was written", "")


def saved(ranks: list[Notes]) -> tuple[str, str, str]:
    """The names in what is saved are those of the model, not of its wrapper."""
    told = [note for notes in ranks for note in of(notes, "saved")]
    for note in told:
        wrong = [name for name in note["names"] if name.startswith("module.")]
        if wrong or note["whole"]:
            what = wrong[0] if wrong else "the wrapper itself"
            return RED, f"{short(note['at'])}: {what} is saved", "save ddp_model.module.state_dict()"
    if not any(note["names"] for note in told):
        return UNSEEN, "no state_dict was saved by torch.save", ""
    return OK, f"no name begins with module., {len(told)} saved", ""


def chance(ranks: list[Notes]) -> tuple[str, str, str]:
    """Dropout and augmentation throw other dice on each rank."""
    dropout = [of(notes, "random")[:FEW] for notes in ranks]
    loads = [[n for n in of(notes, "pass") if n["steps"] and n["augmented"]] for notes in ranks]
    same = [several for several in zip(*dropout, strict=False) if len({note["state"] for note in several}) == 1]
    if same and len(same) == min(map(len, dropout)):
        cure = "torch.manual_seed(seed + rank) after the model is made"
        return RED, f"{short(same[0][0]['at'])}: the same random numbers in the model on all ranks (dropout?)", cure
    if any(len({tuple(note["augmented"]) for note in several}) == 1 for several in zip(*loads, strict=False)):
        at = short(loads[0][0]["begun"])
        return RED, f"{at}: the same random numbers in the dataset on all ranks", "torch.manual_seed(seed + rank)"
    if all(dropout) or all(loads):
        return OK, f"torch's random numbers differ in the {'model' if all(dropout) else 'dataset'}", ""
    return UNSEEN, "torch's generator was not used in model or dataset; numpy, random and workers are not followed", ""


def metrics(ranks: list[Notes]) -> tuple[str, str, str]:
    """What ranks find on shares of the test set is summed or gathered, until the run ends."""
    trained = {note["whole"] for note in of(ranks[0], "pass") if note["steps"]}
    for told in together(ranks, training=False) if end(ranks)[0] == OK else ():
        since, whole = min(note["since"] for note in told), told[0]["whole"]
        after = [[note for note in notes if note["time"] >= since] for notes in ranks]
        sums = any(REDUCES.match(note["name"]) for note in of([*chain(*after)], "collective", "other group", "pair"))
        shares = len({frozenset(note["samples"]) for note in told}) == len(told) and told[0]["complete"]
        files = all(of(notes, "wrote") for notes in after)  # from which somebody may gather
        if whole and whole not in trained and shares and not sums and not files:
            seen = f"{short(told[0]['begun'])}: each rank tests a share, and nothing is reduced or gathered afterwards"
            return RED, seen, "dist.all_reduce of the sums and of the number of samples, then divide"
    return UNSEEN, "what is printed is not followed: is each printed number a sum over all ranks?", ""


LOOKS: dict[str, Callable[[list[Notes]], tuple[str, str, str]]] = {
    "end": end,
    "samples": samples,
    "order": order,
    "evaluation": evaluation,
    "replicas": replicas,
    "gradients": gradients,
    "collectives": collectives,
    "files": files,
    "saved names": saved,
    "dice": chance,
    "metrics": metrics,
}


def judge(ranks: list[Notes]) -> list[Row]:
    """All rows. What a run that did not come to its end has not shown is not green."""
    rows = [Row(name, *look(ranks)) for name, look in LOOKS.items()]
    if rows[0].verdict == RED:
        early = "the run did not come to its end; until then: "
        rows = [row if row.verdict != OK else Row(row.name, UNSEEN, early + row.seen) for row in rows]
    return rows
