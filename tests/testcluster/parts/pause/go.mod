// The process that holds a pod's namespaces, and a node's.
module gracepoint.dev/testcluster/pause

go 1.24.0
