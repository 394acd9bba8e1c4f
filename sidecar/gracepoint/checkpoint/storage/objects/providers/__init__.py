"""The APIs of object stores: Google Cloud Storage and S3, behind the protocol in ``api``.

The other modules of ``objects`` call it. It calls ``http``.
"""
