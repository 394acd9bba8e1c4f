"""Object stores: ``gs://`` and ``s3://``.

``http`` makes requests, and repeats and hedges them. ``providers`` speaks the stores' APIs. ``object_backend``
implements ``Backend`` with them. ``open_bucket`` chooses the API by the scheme of a URI.
"""
