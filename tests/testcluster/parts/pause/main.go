// Command pause holds namespaces open and, as their first process, reaps what is left behind in them.
//
// Kubernetes wants such a process in every pod; the test cluster also runs one as the init process of every node.
// Its arguments are ignored: they are there to be found in the list of processes.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
				break
			}
		}
	}
}
