"""The modules that a standalone package has in place of those of ``fuselab.runtime``.

``fuselab eject --standalone`` copies what a package uses of fuselab's runtime into the package
(``ejection/copied.py``). Most modules are copied as they are. Those here take the place of modules
of the same name that need more of fuselab (launch plans, profiles, registered operators). They use
the public interfaces of torch and Triton alone. ``operator.py`` stands for the whole of
``runtime/dispatch``.
"""
