"""A dump in the files that trainers of drafters read: one module a format, one driver for all.

    from storage.export.formats import FORMATS
    from storage.export.plan import ExportOptions, plan_export
    from storage.export.work import finish, run_item, start

    plan = plan_export("./dump-demo", FORMATS["speculators"], "./for-speculators", ExportOptions())
    start(plan)
    finish(plan, [run_item(item) for item in plan.items()])

``hsdump export`` does the same with many workers. Formats are pure: they turn a sample into the bytes of files.
The driver reads, writes each file whole or not at all, and leaves out what is there already.
"""
