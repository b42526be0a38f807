"""One Protocol per kernel family, a file each.

Letters in shapes: T tokens of a step, packed span after span; S spans; H query heads; K key-value heads (K divides H);
D head size; P pages.

`reference/` defines what each family means; every other implementation is tested against it.
"""
