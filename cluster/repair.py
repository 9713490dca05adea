"""``hsdump repair``: removes what dead writers left in a dump; a resume does the same before it starts."""

from __future__ import annotations

from rich.console import Console

from cluster.report import say, size
from storage.files import Store
from storage.repair import Sized, find_leftovers, remove_leftovers


def repair(url: str, *, dry_run: bool) -> None:
    """Removes leftovers and lists them.

    Args:
        url: the dump.
        dry_run: only list.

    Raises:
        OutputError: there is no dump.
        StorageError: the storage fails.
    """
    console = Console(highlight=False, soft_wrap=True)
    store = Store(url)
    found = find_leftovers(store)
    objects = found.objects if dry_run else remove_leftovers(store, found)
    for key, object_bytes in objects:
        console.print(
            f"{'would remove' if dry_run else 'removed'} {key} ({size(object_bytes)})", markup=False
        )
    for key in found.unreadable:
        console.print(
            f"unreadable   {key}: its shard was left alone; see `hsdump verify {url}`", markup=False
        )
    if found.open:
        shards = ", ".join(str(shard) for shard in found.open)
        console.print(f"{'would revoke' if dry_run else 'revoked'} the claims of uncommitted shards {shards}")
    console.print(_total(objects, dry_run))


def repair_before_run(store: Store) -> None:
    """What a resume does first: it is the dump's only owner, so whatever isn't committed is a leftover."""
    objects = remove_leftovers(store, find_leftovers(store))
    if objects:
        say(f"writers that died: {_total(objects, dry_run=False)}")


def _total(objects: list[Sized], dry_run: bool) -> str:
    total = sum(object_bytes for _, object_bytes in objects)
    return f"{len(objects)} leftovers, {size(total)}, {'would be removed' if dry_run else 'removed'}"
