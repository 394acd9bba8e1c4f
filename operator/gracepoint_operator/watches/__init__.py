"""The watches: kopf watches the cluster, and every object goes to the controller.

Only this package imports kopf. ``__main__`` starts and ends it. It calls the controller and ``cache.watch_state``.
"""
