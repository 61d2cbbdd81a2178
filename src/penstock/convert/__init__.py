"""Settings of other systems as ours: `penstock convert trl|verl|openrlhf|colossalai|xtuner FILE`.

`words.py` reads a command line or a config file, `config/systems/SYSTEM.csv` says what each word means here,
`write.py` writes the TOML. May import `config/` only. Code that runs for users of other systems is in
`compat/`.
"""
