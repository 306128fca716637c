"""The viewer: a dump as one page for a browser, and as text for a terminal.

`token_runs` says what each token is, `talk` which calls and results its text holds, `times` when each step was,
`problems` what looks wrong, `drift_marks` what encoding again would give; `sample_view` puts it into the rows and
details that the page shows, `dump_view` reads a whole dump, `page` writes the page, `live_server` serves it while a run
writes, `text_view` prints it.
"""
