"""What `stepgraph bench` measures, a file a measurement, and how it is reported.

`cli` is the command, `options` its command line, `explain` the command `stepgraph explain`;
`steady`, `interference`, `churn`, `start`, `host` and `kernels` are measurements; `run_steady` and
`run_scenarios` decide which engines are started for them; `baseline`
is another runtime beside ours (`continuous`, `static_generate`: how it decodes; `hf_config` and
`hf_model`: our model in it); `tables` and `environment` are what is printed and written.
Importing the package imports none of them.
"""
