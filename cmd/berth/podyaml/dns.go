package podyaml

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// maxNameservers is the number that C libraries read, and the API server's limit.
const maxNameservers = 3

// dns returns the pod's resolver config. nil means the host's, which the runtime supplies.
func (p *Plan) dns() *runtimeapi.DNSConfig {
	own := p.Pod.Spec.DNSConfig
	if p.Pod.Spec.DNSPolicy == corev1.DNSDefault && own == nil {
		return nil
	}
	out := &runtimeapi.DNSConfig{}
	if p.Pod.Spec.DNSPolicy == corev1.DNSDefault {
		out = parseResolvConf(p.Host.ResolvConf)
	}
	if own != nil {
		// The pod's servers come first. The host's fill the remaining places.
		out.Servers = out.Servers[:min(len(out.Servers), max(maxNameservers-len(own.Nameservers), 0))]
		out.Servers = appendNew(out.Servers, own.Nameservers...)
		out.Searches = appendNew(out.Searches, own.Searches...)
		out.Options = mergeOptions(out.Options, own.Options)
	}
	return out
}

// appendNew appends the elements that the list does not contain yet.
func appendNew(list []string, more ...string) []string {
	for _, s := range more {
		if !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	return list
}

// mergeOptions replaces options of the host by the pod's options of the same name.
func mergeOptions(host []string, own []corev1.PodDNSConfigOption) []string {
	out := slices.DeleteFunc(slices.Clone(host), func(option string) bool {
		name, _, _ := strings.Cut(option, ":")
		return slices.ContainsFunc(own, func(o corev1.PodDNSConfigOption) bool { return o.Name == name })
	})
	for _, o := range own {
		if v := value(o.Value); v != "" {
			out = append(out, o.Name+":"+v)
		} else {
			out = append(out, o.Name)
		}
	}
	return out
}

// parseResolvConf parses resolv.conf(5). The last of several search lines counts.
func parseResolvConf(file []byte) *runtimeapi.DNSConfig {
	out := &runtimeapi.DNSConfig{}
	for line := range strings.Lines(string(file)) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		switch words[0] {
		case "nameserver":
			out.Servers = append(out.Servers, words[1])
		case "search":
			out.Searches = words[1:]
		case "options":
			out.Options = append(out.Options, words[1:]...)
		}
	}
	return out
}

// EtcHosts returns the content of the pod's hosts file, as kubelet writes it. With hostNetwork it
// begins with the host's file, else with the loopback names and the pod's own. The manifest's
// aliases follow.
func (p *Plan) EtcHosts(podIPs []string) []byte {
	var out bytes.Buffer
	if p.Pod.Spec.HostNetwork {
		out.WriteString("# The host's hosts file, copied when the pod started.\n")
		out.Write(p.Host.EtcHosts)
		if !bytes.HasSuffix(p.Host.EtcHosts, []byte{'\n'}) {
			out.WriteByte('\n')
		}
	} else {
		out.WriteString("# Made for this pod when it started.\n")
		out.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
		out.WriteString("fe00::\tip6-localnet\nfe00::\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n")
		for _, ip := range podIPs {
			fmt.Fprintf(&out, "%s\t%s\n", ip, p.hostname())
		}
	}
	if len(p.Pod.Spec.HostAliases) > 0 {
		out.WriteString("\n# Entries from the manifest's hostAliases.\n")
	}
	for _, alias := range p.Pod.Spec.HostAliases {
		fmt.Fprintf(&out, "%s\t%s\n", alias.IP, strings.Join(alias.Hostnames, "\t"))
	}
	return out.Bytes()
}
