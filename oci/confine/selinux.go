package confine

import (
	"fmt"
	"regexp"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux"
	"github.com/opencontainers/selinux/go-selinux/label"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
)

// Labels are the SELinux labels of a pod or container, empty on a host without SELinux. [NewLabels]
// chooses them.
type Labels struct {
	Process string `json:"process,omitempty"`
	Mount   string `json:"mount,omitempty"` // label of the root filesystem, and of berth's mounts in the container
}

// NewLabels returns the labels of a container, or of a pod if the pod argument is empty. A
// container gets its pod's labels, with the parts that its options name replaced. A pod's missing
// categories are drawn at random. The categories belong to the caller until selinux.ReleaseLabel,
// so it calls NewLabels once and records the result. Like containerd and CRI-O, berth ignores the
// options on hosts without SELinux.
//
// The error is InvalidArgument for invalid options.
func NewLabels(o *runtimeapi.SELinuxOption, pod Labels, facts host.Facts) (Labels, error) {
	options, err := labelOptions(o)
	if err != nil || !facts.SELinux {
		return Labels{}, err
	}
	if len(options) == 0 && pod.Process != "" {
		return pod, nil
	}
	if options, err = withPod(pod, options); err != nil {
		return Labels{}, err
	}
	process, mount, err := label.InitLabels(options)
	if err != nil {
		return Labels{}, errdefs.InvalidArgument("selinux_options: %w", err)
	}
	return Labels{Process: process, Mount: mount}, nil
}

// withPod puts the parts of the pod's label before a container's options, which win. With other
// categories than its pod, a container could not read the pod's files, such as resolv.conf. An
// empty pod adds nothing.
func withPod(pod Labels, options []string) ([]string, error) {
	inherited, err := selinux.DupSecOpt(pod.Process)
	if err != nil {
		return nil, fmt.Errorf("parse SELinux label %q of the pod: %w", pod.Process, err)
	}
	return append(inherited, options...), nil
}

// SetSELinux sets the labels of the process and the mounts. A privileged container's process gets
// no label, because restrictions do not apply to it (LinuxContainerSecurityContext.privileged).
func SetSELinux(labels Labels, privileged bool, spec *specs.Spec) {
	spec.Linux.MountLabel = labels.Mount
	if !privileged {
		spec.Process.SelinuxLabel = labels.Process
	}
}

var (
	labelWord  = regexp.MustCompile(`^[a-zA-Z0-9_.]+$`)
	labelLevel = regexp.MustCompile(`^s[0-9]{1,2}(-s[0-9]{1,2})?(:c[0-9]{1,4}([.,]c[0-9]{1,4})*)?$`)
)

func labelOptions(o *runtimeapi.SELinuxOption) ([]string, error) {
	var options []string
	for _, part := range []struct {
		name, value string
		valid       *regexp.Regexp
	}{
		{"user", o.GetUser(), labelWord},
		{"role", o.GetRole(), labelWord},
		{"type", o.GetType(), labelWord},
		{"level", o.GetLevel(), labelLevel},
	} {
		if part.value == "" {
			continue
		}
		if !part.valid.MatchString(part.value) {
			return nil, errdefs.InvalidArgument("selinux_options: %s %q is not valid", part.name, part.value)
		}
		options = append(options, part.name+":"+part.value)
	}
	return options, nil
}
