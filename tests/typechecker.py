"""beartype as the tests use it: an int serves where a float is asked for, as Python's rule is."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
