"""Object stores: ``gs://`` and ``s3://``.

``http`` makes requests, and ``persistence`` repeats and hedges them. ``gcs`` and ``s3`` speak the
stores' APIs, as ``provider`` says. ``object_store`` implements ``StoragePath`` with them, and chooses the API by
the scheme of a URI; ``requests`` reads and writes large objects.
"""
