"""The operator's certificate, and the authorities by which pods and the API server check it.

The server runs it, and the channel and the webhooks hand out its bundle. It calls ``kube`` to read and write its own
Secret, its ConfigMap and the webhook configurations.
"""
