"""Object stores: ``gs://`` and ``s3://``.

``connection`` makes HTTP requests, ``persistence`` repeats and hedges them, ``gcs`` and ``s3`` speak the stores' APIs,
and ``object_backend`` implements ``Backend`` with them. ``open_bucket`` chooses by the scheme of a URI.
"""
