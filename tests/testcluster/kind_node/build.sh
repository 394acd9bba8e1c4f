#!/bin/bash
# A node image for kind where the published one cannot be downloaded: kind's own files, Debian's systemd, containerd and
# runc, and the programs of Kubernetes that the test cluster builds (python -m tests.testcluster build).
#
#   tests/testcluster/kind_node/build.sh FOLDER     writes FOLDER/node.tar and FOLDER/jobset.yaml
#
# Then: podman load -i FOLDER/node.tar, and TESTCLUSTER_NODE_IMAGE=localhost/kind-node:1 TESTCLUSTER_JOBSET_MANIFEST=FOLDER/jobset.yaml.
# It needs root, Go, a network for Debian's packages and Go's modules, and 6 GB of disk.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
WORK=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$HERE/../../.."
PYTHON=${PYTHON:-.venv/bin/python}
program() { "$PYTHON" -c "from tests.testcluster import parts; print(parts.program('$1'))"; }
version() { "$PYTHON" -c "from tests.testcluster import parts; print(parts.part('$1').version)"; }
JOBSET_FOLDER=$("$PYTHON" -c "from tests.testcluster import parts; print(parts.module_folder('jobset'))")
KUBERNETES=$(version kubernetes) JOBSET=$(version jobset) PARTS=$PWD/tests/testcluster/parts
KIND_VERSION=v0.30.0
KIND=$(cd /tmp && go mod download -json "sigs.k8s.io/kind@$KIND_VERSION" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')/images/base
# Tags that kubeadm of this Kubernetes asks for. The programs in the images are those of the test cluster.
ETCD=3.6.5-0 COREDNS=v1.12.1 PAUSE=3.10
declare -A PROGRAMS
for name in kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl etcd coredns pause jobset; do
  PROGRAMS[$name]=$(program "$name")
done
cd "$WORK"
trap 'rm -rf root run state images context rootfs.tar rootfs.new.tar kubeadm kubeadm-src' EXIT
export BUILDAH_ISOLATION=chroot
BUILDAH="buildah --root $WORK/root --runroot $WORK/run --storage-driver overlay"
mkdir -p images state context

echo "Debian's packages"
mmdebstrap --quiet --variant=minbase --include=systemd,dbus,conntrack,iptables,iproute2,ethtool,mount,kmod,libseccomp2,pigz,ca-certificates,jq,procps,containerd,runc,containernetworking-plugins bookworm rootfs.tar

echo "kubeadm $KUBERNETES"
cp -r "$PARTS/kubernetes" kubeadm-src
minor=${KUBERNETES#v1.}; minor=${minor%%.*}
base=k8s.io/component-base/version
(cd kubeadm-src && CGO_ENABLED=0 GOWORK=off GOTOOLCHAIN=auto GOFLAGS=-mod=mod go build -trimpath -buildvcs=false -o ../kubeadm \
  -ldflags "-s -w -X $base.gitVersion=$KUBERNETES -X $base.gitMajor=1 -X $base.gitMinor=$minor" k8s.io/kubernetes/cmd/kubeadm)

# An image of one program: its name, its tag, where the program is in it, who runs it (root).
image() {
  rm -rf context/*; cp "${PROGRAMS[$1]}" context/program
  printf 'FROM scratch\nCOPY program %s\nENV PATH=/usr/local/bin:/usr/bin:/bin\nUSER %s\nENTRYPOINT ["%s"]\n' "$3" "${4:-0}" "$3" > context/Dockerfile
  $BUILDAH bud --quiet --layers=false --tag "$2" --file context/Dockerfile context
  $BUILDAH push --quiet "$2" "docker-archive:images/$1.tar:$2"
}
# An image of programs on Debian: its name, its tag, its entry point, the programs.
on_debian() {
  local name=$1 tag=$2 entry=$3; shift 3
  rm -rf context/*; cp "$@" context/
  printf 'FROM localhost/rootfs\nCOPY . /usr/local/bin/\n%s\n' "$entry" > context/Dockerfile
  echo Dockerfile > context/.dockerignore
  $BUILDAH bud --quiet --layers --tag "$tag" --file context/Dockerfile context
  $BUILDAH push --quiet "$tag" "docker-archive:images/$name.tar:$tag"
}
echo "images of the control plane, the network and JobSet"
for name in kube-apiserver kube-controller-manager kube-scheduler; do
  image $name "registry.k8s.io/$name:$KUBERNETES" /usr/local/bin/$name
done
image etcd "registry.k8s.io/etcd:$ETCD" /usr/local/bin/etcd
image coredns "registry.k8s.io/coredns/coredns:$COREDNS" /coredns
image pause "registry.k8s.io/pause:$PAUSE" /pause
image jobset "registry.k8s.io/jobset/jobset:$JOBSET" /manager 65532  # its pod must not run as root
rm -rf context/*; ln rootfs.tar context/rootfs.tar; printf 'FROM scratch\nADD rootfs.tar /\n' > context/Dockerfile
$BUILDAH bud --quiet --layers --tag localhost/rootfs --file context/Dockerfile context
on_debian kube-proxy "registry.k8s.io/kube-proxy:$KUBERNETES" "" "${PROGRAMS[kube-proxy]}"
on_debian network localhost/network:1 'ENTRYPOINT ["/usr/local/bin/network.sh"]' "${PROGRAMS[kubectl]}" "$HERE/network.sh"

echo "the node"
rm -rf context/*
cp -r "$KIND/files" context/files; chmod -R u+w context/files
cp "${PROGRAMS[kubelet]}" "${PROGRAMS[kubectl]}" kubeadm "$HERE/network.yaml" "$HERE/storage.yaml" "$HERE/Dockerfile" context/
cp context/network.yaml context/default-cni.yaml; cp context/storage.yaml context/default-storage.yaml
echo "$KUBERNETES" > context/version
# As kind's own Dockerfile makes it.
ctr oci spec | jq '.hooks.createContainer[.hooks.createContainer | length] |= . + {"path": "/kind/bin/mount-product-files.sh"}
  | del(.process.rlimits)' > context/cri-base.json
$BUILDAH bud --quiet --layers=false --tag localhost/node --file context/Dockerfile context
container=$($BUILDAH from localhost/node)
containerd --root "$($BUILDAH mount "$container")/var/lib/containerd" --state "$WORK/state" --address "$WORK/containerd.sock" --log-level error &
daemon=$!
for _ in $(seq 100); do ctr --address "$WORK/containerd.sock" version > /dev/null 2>&1 && break; sleep 0.1; done
for file in images/*.tar; do ctr --address "$WORK/containerd.sock" -n k8s.io images import --no-unpack "$file"; done
kill $daemon; wait $daemon || true
rm -f "$WORK"/containerd.sock*
$BUILDAH umount "$container" > /dev/null
$BUILDAH commit --quiet "$container" localhost/kind-node:1
rm -f node.tar
$BUILDAH push --quiet localhost/kind-node:1 docker-archive:node.tar:localhost/kind-node:1
$BUILDAH rmi --all --force > /dev/null

"${PROGRAMS[kubectl]}" kustomize "$JOBSET_FOLDER/config/default" |
  sed "s#image: .*/jobset/jobset:.*#image: registry.k8s.io/jobset/jobset:$JOBSET#" > jobset.yaml
ls -l "$WORK/node.tar" "$WORK/jobset.yaml"
