package oci

import (
	"strings"

	"berth/internal/errdefs"
)

// maxHostname is the kernel's limit in bytes (__NEW_UTS_LEN). maxLabel is the limit of RFC 1123 for
// each part between dots.
const (
	maxHostname = 64
	maxLabel    = 63
)

// CheckHostname refuses an invalid hostname with InvalidArgument. A hostname has 1 to 64 bytes. Its
// labels have at most 63 letters, digits, "-" and "_", and no "-" at either end. The kernel accepts
// "_". One trailing dot is allowed: with setHostnameAsFQDN and an empty cluster domain kubelet
// sends "web.shop.default.svc.".
func CheckHostname(hostname string) error {
	if hostname == "" || len(hostname) > maxHostname {
		return errdefs.InvalidArgument("hostname %q: must have 1 to %d bytes, not %d", hostname, maxHostname, len(hostname))
	}
	for label := range strings.SplitSeq(strings.TrimSuffix(hostname, "."), ".") {
		if !isLabel(label) {
			return errdefs.InvalidArgument("hostname %q: %q is not a DNS label", hostname, label)
		}
	}
	return nil
}

// checkPodHostname refuses an invalid hostname of a pod. A pod may have no hostname.
func checkPodHostname(pod Pod) error {
	if name := pod.Config.GetHostname(); name != "" {
		return CheckHostname(name)
	}
	return nil
}

func isLabel(s string) bool {
	if s == "" || len(s) > maxLabel || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
			return false
		}
		return true
	})
}
