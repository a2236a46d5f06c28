"""Seeds as a function of what is drawn, so that sampling is reproducible whatever runs beside it."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from e.g. (run seed, step, group, member, turn, role): the same on every machine and Python.

    Blake2b of the parts with their types, so (1, "2") and ("1", 2) differ. 31 bits fit every sampler's seed.
    """
    exact = tuple(p if isinstance(p, str) else int(p) for p in parts)  # a numpy integer prints otherwise
    digest = hashlib.blake2b(repr(exact).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33
