package oci

import (
	"math"
	"regexp"
	"strconv"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// sysctlName is kubelet's pattern for names (validation.SysctlContainSlashFmt).
var sysctlName = regexp.MustCompile(`^[a-z0-9]([-_a-z0-9]*[a-z0-9])?([./][a-z0-9]([-_a-z0-9]*[a-z0-9])?)*$`)

// ipcSysctls belong to the IPC namespace. So do all sysctls below fs.mqueue.
var ipcSysctls = map[string]bool{
	"kernel.msgmax": true, "kernel.msgmnb": true, "kernel.msgmni": true, "kernel.sem": true,
	"kernel.shmall": true, "kernel.shmmax": true, "kernel.shmmni": true, "kernel.shm_rmid_forced": true,
}

// Sysctl checks a sysctl and returns its name with dots as separators, as sysctl(8) writes it. A
// slash in the result stands for a dot in an interface's name. It allows only sysctls of namespaces
// that the pod does not share with the node. It refuses unusual characters in values: in CRI-O a
// "+" separated several settings (CVE-2022-0811). Errors are InvalidArgument.
func Sysctl(pod Pod, name, value string) (string, error) {
	key, err := dottedSysctl(name)
	if err != nil {
		return "", err
	}
	if err := checkSysctlNamespace(key, pod); err != nil {
		return "", err
	}
	if strings.ContainsFunc(strings.TrimSuffix(value, "\n"), isOddInSysctl) {
		return "", errdefs.InvalidArgument("sysctl %s: value %q has invalid characters", name, value)
	}
	return key, nil
}

// SetsNetworkSysctls reports whether a pod's config sets network sysctls other than defaultSysctls.
func SetsNetworkSysctls(config *runtimeapi.PodSandboxConfig) bool {
	for name := range config.GetLinux().GetSysctls() {
		if strings.HasPrefix(name, "net.") || strings.HasPrefix(name, "net/") {
			return true
		}
	}
	return false
}

// sysctls checks a pod's sysctls and adds defaultSysctls.
func sysctls(pod Pod) (map[string]string, error) {
	out := make(map[string]string)
	for name, value := range pod.Config.GetLinux().GetSysctls() {
		key, err := Sysctl(pod, name, value)
		if err != nil {
			return nil, err
		}
		if _, twice := out[key]; twice {
			return nil, errdefs.InvalidArgument("sysctl %s is given twice, with dots and with slashes", key)
		}
		out[key] = value
	}
	if !pod.hostNetwork() {
		for key, value := range defaultSysctls(pod) {
			if _, set := out[key]; !set {
				out[key] = value
			}
		}
	}
	if len(out) == 0 {
		return nil, nil
	}
	return out, nil
}

// defaultSysctls apply to a pod with a private network namespace unless its config sets them. They
// allow binding to port 80 and using ping without root, which is harmless in the pod's namespace.
// Users of containerd and Docker rely on both settings. In a user namespace, the range can contain
// only groups of the namespace.
func defaultSysctls(pod Pod) map[string]string {
	last := uint32(math.MaxInt32)
	if m := pod.Mappings; m != nil {
		last = min(last, m.GIDs[0].Size-1)
	}
	return map[string]string{
		"net.ipv4.ip_unprivileged_port_start": "0",
		"net.ipv4.ping_group_range":           "0 " + strconv.FormatUint(uint64(last), 10),
	}
}

func isOddInSysctl(r rune) bool { return r != '\t' && r < ' ' || r > '~' || r == '+' }

// dottedSysctl converts a name to the form with dots as separators. As for sysctl(8) and kubelet,
// the first dot or slash in a name is its separator. The other character is then a dot inside a
// component. So net/ipv4/conf/eth0.100/rp_filter is net.ipv4.conf.eth0/100.rp_filter. Only network
// sysctls have such components. No component is empty, ".." or a path.
func dottedSysctl(name string) (string, error) {
	if len(name) > 253 || !sysctlName.MatchString(name) {
		return "", errdefs.InvalidArgument("sysctl %q is not a valid name", name)
	}
	key := name
	if i := strings.IndexAny(name, "./"); i >= 0 && name[i] == '/' {
		key = strings.NewReplacer("/", ".", ".", "/").Replace(name)
	}
	if strings.Contains(key, "/") && !strings.HasPrefix(key, "net.") {
		return "", errdefs.InvalidArgument("sysctl %q is not a valid name", name)
	}
	return key, nil
}

func checkSysctlNamespace(key string, pod Pod) error {
	switch {
	case ipcSysctls[key] || strings.HasPrefix(key, "fs.mqueue."):
		if pod.hostIPC() {
			return errdefs.InvalidArgument("sysctl %s: not allowed on the node's IPC namespace", key)
		}
	case strings.HasPrefix(key, "net."):
		if pod.hostNetwork() {
			return errdefs.InvalidArgument("sysctl %s: not allowed on the node's network", key)
		}
	case key == "kernel.domainname":
		if pod.hostNetwork() { // the pod then also uses the node's UTS namespace
			return errdefs.InvalidArgument("sysctl %s: not allowed on the node's network", key)
		}
	default:
		return errdefs.InvalidArgument("sysctl %s does not belong to a namespace of the pod", key)
	}
	return nil
}
