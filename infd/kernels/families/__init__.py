"""The protocols of the kernel families, one file per family.

Letters in shapes: T tokens of a step, packed span after span; S spans; H query heads; K key heads (K divides H); D head
size; P pages.

`reference/` defines every family: the other implementations are tested against its results.
"""
