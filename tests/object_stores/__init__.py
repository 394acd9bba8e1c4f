"""Real object stores on this machine, for tests, benchmarks and the demo.

``servers`` starts fake-gcs-server (Google Cloud Storage's API, in memory) and versitygw (S3's API over a folder), each
on a port of the loopback, and gives buckets with the environment variables that clients need. ``make servers`` builds
both; that needs Go, and neither root nor a cluster. ``fixtures`` is for pytest: ``gcs`` and ``s3`` are servers,
``gs_bucket`` and ``s3_bucket`` are fresh buckets with the environment set, ``bucket`` is one after the other.

``fault_proxy`` is a proxy in front of a server: latency, bandwidth, and the faults of ``faults``, chosen by rules; it
counts requests and bytes by method and kind. ``cut_after`` is for a client that dies after its n-th request. ::

    with FaultProxy(server.url) as proxy, proxy.rules(Rule(Fault(How.LOST_REPLY), kinds=("write",), times=1)):
        bucket = server.bucket(url=proxy.url)

What the servers show is how conditions, listings and errors behave. How fast a real store is, they do not show;
delays and faults come from the proxy in front of them.

What is known of them:

- A bucket's name has at least three letters.
- fake-gcs-server knows ``ifGenerationMatch`` of Google's JSON API, which TensorStore uses. It refuses plain PUTs of the
  XML API, which obstore uses: ``gs://`` cannot be tried with obstore here.
- versitygw knows ``If-None-Match: *`` and ``If-Match`` for PUT and for the end of a multipart upload.
"""
