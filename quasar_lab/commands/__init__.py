"""The commands of `quasar-lab`, a module each: `add` puts its parser in, `run` does the work."""
