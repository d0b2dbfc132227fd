package state

import (
	"strings"

	"berth/internal/errdefs"
)

// maxHostname is the kernel's limit (__NEW_UTS_LEN) in bytes; maxLabel that of RFC
// 1123 for each part between dots.
const (
	maxHostname = 64
	maxLabel    = 63
)

// CheckHostname refuses what cannot be a pod's hostname: it has 1 to 64 bytes, and the parts
// between dots consist of letters, digits, "-" and "_" (which the kernel takes and some images'
// hosts have), at most 63 each, without "-" at either end. One dot may end it: with
// setHostnameAsFQDN and an empty cluster domain kubelet sends "web.shop.default.svc.".
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
