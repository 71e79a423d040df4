"""Where each microsecond of a step goes, and how far that is from the limit.

`ranges` names what the host does for nsys, `timeline` keeps the times of the last steps, `stats`
summarises them with the number of samples they rest on, `roofline` says what a step must move, and
`bandwidth` how fast this device can move it; `attribution` names kernels inside replayed graphs.
Importing the package imports none of them: `stats`, `roofline`, `timeline` and `attribution` need
the standard library only, `ranges` loads nvtx, and `bandwidth` loads torch when it measures.
"""
