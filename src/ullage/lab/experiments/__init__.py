"""One module per experiment, each with `run(setting) -> Result`; `registry` lists them."""
