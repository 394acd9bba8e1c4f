#!/bin/bash
# In place of kind's network plugin: the configuration of CNI for this node's pods, and routes to those of the others.
account=/var/run/secrets/kubernetes.io/serviceaccount
nodes() {
  kubectl --server="https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT" --certificate-authority=$account/ca.crt --token="$(cat $account/token)" get nodes \
    -o jsonpath='{range .items[*]}{.metadata.name} {.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}'
}
while true; do
  if found=$(nodes); then
    while read -r name subnet address; do
      [ -n "$subnet" ] && [ -n "$address" ] || continue
      if [ "$name" = "$NODE" ]; then
        wanted='{"cniVersion":"0.3.1","name":"kind","plugins":[
          {"type":"ptp","ipMasq":false,"mtu":1500,"ipam":{"type":"host-local","dataDir":"/run/cni-ipam-state","routes":[{"dst":"0.0.0.0/0"}],"ranges":[[{"subnet":"'$subnet'"}]]}},
          {"type":"portmap","capabilities":{"portMappings":true}}]}'
        [ "$(cat /etc/cni/net.d/10-kind.conflist 2> /dev/null)" = "$wanted" ] || echo "$wanted" > /etc/cni/net.d/10-kind.conflist
      else
        ip route replace "$subnet" via "$address"
      fi
    done <<< "$found"
  fi
  sleep 2
done
