"""A job as one HTML page: its figures, its checkpoints and its restarts.

`reading` reads the folder of a job, `job` and the modules it imports turn the files into data, `figures` and `drawings`
turn data into what a page draws, and `page` writes HTML. All but `reading` are pure, and only `page` knows HTML, so
that a live page can draw the same figures. No module imports torch.

All content of the files is untrusted: names, termination messages, samples of text, paths, values of the spec.
"""
