"""What all workers run where each asks for a step in its session, and what a session's workers must be for it."""

import json
from collections.abc import Mapping

from autodist_py.capture.doors.graph import Signature, Synchronized
from autodist_py.program.build import Compiler
from autodist_py.proto.errors import SessionError
from autodist_py.proto.text import shown


def one_signature(everyone: Mapping[int, bytes]) -> Signature:
    """The signature by which each worker has what it asks for.

    Args:
        everyone: the feeds, fetches and targets of each worker as JSON, by rank.

    Raises:
        SessionError: the workers feed different tensors.
    """
    asked = {rank: Signature(*map(tuple, json.loads(text))) for rank, text in sorted(everyone.items())}
    for rank, signature in asked.items():
        if signature.feeds != asked[0].feeds:
            raise SessionError(
                f"a step is one of all workers, so all feed the same tensors; the chief feeds {shown(asked[0].feeds)}, "
                f"and worker {rank} {shown(signature.feeds)}. Give every worker the hooks that feed"
            )
    fetches = dict.fromkeys(name for signature in asked.values() for name in signature.fetches)  # The chief's first.
    targets = dict.fromkeys(name for signature in asked.values() for name in signature.targets)
    return Signature(asked[0].feeds, tuple(fetches), tuple(targets))


def part_of(first: Signature, signature: Signature) -> Signature:
    """The first step's signature, which has all of `signature`.

    Raises:
        SessionError: it has not: another program would have servers of its own, which wait for other gradients.
    """
    is_part = set(signature.fetches) <= set(first.fetches) and set(signature.targets) <= set(first.targets)
    if is_part and signature.feeds == first.feeds:
        return first
    raise SessionError(
        "workers take their steps by themselves, so all steps are of one program, which feeds and fetches what the "
        f"first one of any worker did: {shown((*first.feeds, *first.fetches, *first.targets))}; received "
        f"{shown((*signature.feeds, *signature.fetches, *signature.targets))}. Fetch in the first step what any step "
        "fetches"
    )


def require_replicas(synchronized: Synchronized, compiler: Compiler) -> None:
    """Refuse another number of replicas than the optimizer was told: it would wait for gradients that never come.

    Raises:
        SessionError: the numbers; there are too few tokens at the start; or workers are given one batch for all.
    """
    if compiler.shares_batches:
        raise SessionError(
            "each worker of SyncReplicasOptimizer trains on all that it is fed, and AutoDist(batch='global') would "
            "share it out, though the gradients count alike. Use AutoDist(batch='local'), and feed each worker its own "
            "data"
        )
    workers, replicas = compiler.cluster.num_workers, len(compiler.cluster.resources.replica_devices)
    wanted, total = synchronized.replicas_to_aggregate, synchronized.num_replicas
    if total != workers or replicas != workers:
        raise SessionError(
            f"a replica of SyncReplicasOptimizer is a worker of one device; it has total_num_replicas={total}, and the "
            f"run has {workers} workers with {replicas} devices. Give it total_num_replicas={workers}, and each worker "
            "one device"
        )
    if synchronized.first_tokens < wanted - total:
        raise SessionError(
            f"an update waits for replicas_to_aggregate={wanted} gradients of {total} workers, which send again by "
            f"tokens: at least {wanted - total} at the start, and there are {synchronized.first_tokens}. Use the hook "
            "of make_session_run_hook(is_chief), or get_init_tokens_op(), before the session is made"
        )
