"""Where a model's files come from, and whether they are what they should be.

`cache` keeps them, `wheel` and `conversion` bring the default model, `hub` brings any other one,
`folder` judges what is in a folder. `quasar_lab.loading` turns a folder into a model.
"""
