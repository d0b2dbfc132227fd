// Package confine converts the CRI's requests for capabilities, seccomp filters, AppArmor profiles
// and SELinux labels to a runtime-spec.
//
// # Contract
//
// The package is pure, except that it draws random SELinux categories. It reads the host's files
// through [Files]. It refuses requests that the host cannot fulfil. SELinux labels on a host
// without SELinux are an exception, because every kubelet may send them. InvalidArgument errors
// name the field. FailedPrecondition errors name the missing feature of the host.
package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
)

// Files gives access to the host's files.
type Files interface {
	// ReadProfile reads a seccomp profile in JSON.
	ReadProfile(path string) ([]byte, error)
	// AppArmorLoaded reports whether the kernel has an AppArmor profile of that name.
	AppArmorLoaded(name string) (bool, error)
}

const localhostPrefix = "localhost/"

// Profile is the request of a seccomp or AppArmor field, from [NewProfile] or [AppArmorProfile].
type Profile struct {
	kind runtimeapi.SecurityProfile_ProfileType
	ref  string // Localhost: a path (seccomp) or a name (AppArmor)
	set  bool   // false: no request
	bad  string // an invalid value of the deprecated field, or ""

	pulled string                          // OCI: the reference of a pulled profile (KEP-6061)
	base   *runtimeapi.SecurityProfileBase // OCI: nil means RuntimeDefault
}

// NewProfile reads a profile field or its deprecated predecessor, a string. If both are missing,
// the request is Unconfined.
func NewProfile(p *runtimeapi.SecurityProfile, deprecated string) Profile {
	if p != nil {
		return Profile{kind: p.GetProfileType(), ref: strings.TrimPrefix(p.GetLocalhostRef(), localhostPrefix), set: true,
			pulled: p.GetOciRef(), base: p.GetBaseProfile()}
	}
	switch deprecated {
	case "":
		return Profile{kind: runtimeapi.SecurityProfile_Unconfined}
	case "unconfined":
		return Profile{kind: runtimeapi.SecurityProfile_Unconfined, set: true}
	case "runtime/default", "docker/default":
		return Profile{kind: runtimeapi.SecurityProfile_RuntimeDefault, set: true}
	}
	if ref, ok := strings.CutPrefix(deprecated, localhostPrefix); ok {
		return Profile{kind: runtimeapi.SecurityProfile_Localhost, ref: ref, set: true}
	}
	return Profile{bad: deprecated, set: true}
}

func (r Profile) check(field string) error {
	if r.kind != runtimeapi.SecurityProfile_OCI && (r.pulled != "" || r.base != nil) {
		return errdefs.InvalidArgument("%s: oci_ref and base_profile need profile_type OCI", field)
	}
	switch r.kind {
	case runtimeapi.SecurityProfile_OCI:
		return r.checkOCI(field)
	case runtimeapi.SecurityProfile_RuntimeDefault, runtimeapi.SecurityProfile_Unconfined:
		if r.ref != "" {
			return errdefs.InvalidArgument("%s: localhost_ref %q needs profile_type Localhost", field, r.ref)
		}
	case runtimeapi.SecurityProfile_Localhost:
		if r.ref == "" {
			return errdefs.InvalidArgument("%s: profile_type Localhost needs localhost_ref", field)
		}
	default:
		return errdefs.InvalidArgument("%s: unknown profile_type %d", field, r.kind)
	}
	if r.bad != "" {
		return errdefs.InvalidArgument("%s: unknown profile %q", field, r.bad)
	}
	return nil
}

func (r Profile) checkOCI(field string) error {
	path := r.base.GetLocalhostRef()
	switch t := r.base.GetType(); {
	case field != seccompField:
		return errdefs.InvalidArgument("%s: profile_type OCI is for seccomp only", field)
	case r.pulled == "":
		return errdefs.InvalidArgument("%s: profile_type OCI needs oci_ref", field)
	case r.ref != "":
		return errdefs.InvalidArgument("%s: localhost_ref %q needs profile_type Localhost", field, r.ref)
	case t == runtimeapi.SecurityProfileBase_RuntimeDefault && path != "":
		return errdefs.InvalidArgument("%s: localhost_ref %q of base_profile needs type Localhost", field, path)
	case t == runtimeapi.SecurityProfileBase_Localhost && path == "":
		return errdefs.InvalidArgument("%s: type Localhost of base_profile needs localhost_ref", field)
	case t != runtimeapi.SecurityProfileBase_RuntimeDefault && t != runtimeapi.SecurityProfileBase_Localhost:
		return errdefs.InvalidArgument("%s: unknown type %d of base_profile", field, t)
	}
	return nil
}

// SeccompDefaults are the node's choices for requests that do not name a profile, and the profiles
// that the node has pulled.
type SeccompDefaults struct {
	File  string // profile of RuntimeDefault; empty: the built-in profile
	Unset bool   // RuntimeDefault also applies if there is no request
	// Pulled returns the JSON of a pulled profile, or NotFound. It is nil if the pod's runtime
	// cannot use such profiles.
	Pulled func(ref string) ([]byte, error)
}

const seccompField = "seccomp"

// SetSeccomp sets the requested filter. If there is no request, it sets no filter, as the CRI
// specifies, unless the node has another default. The built-in profile depends on the capabilities
// in spec, and on the running kernel and architecture.
func SetSeccomp(
	r Profile, defaults SeccompDefaults, privileged bool, facts host.Facts, files Files, spec *specs.Spec,
) (err error) {
	if err := r.check(seccompField); err != nil {
		return err
	}
	if !r.set && defaults.Unset {
		r.kind = runtimeapi.SecurityProfile_RuntimeDefault
	}
	if privileged || r.kind == runtimeapi.SecurityProfile_Unconfined {
		return nil
	}
	if !facts.Seccomp {
		return errdefs.FailedPrecondition("seccomp: profile %s requested, but the kernel has no seccomp filters", r.kind)
	}
	switch r.kind {
	case runtimeapi.SecurityProfile_OCI:
		spec.Linux.Seccomp, err = pulledProfile(r, defaults, files, spec)
	case runtimeapi.SecurityProfile_Localhost:
		spec.Linux.Seccomp, err = localhostProfile(r.ref, files, spec)
	default:
		spec.Linux.Seccomp, err = defaultProfile(defaults, files, spec)
	}
	return err
}

func defaultProfile(defaults SeccompDefaults, files Files, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	if defaults.File != "" {
		return nodeProfile(defaults.File, files, spec)
	}
	profile, err := seccomp.GetDefaultProfile(spec)
	if err != nil {
		return nil, errdefs.Internal("seccomp: default profile: %w", err)
	}
	return profile, nil
}

// pulledProfile returns a pulled profile with its base. The runtime-spec has only one profile, so
// the JSON of the base is in ListenerMetadata, which has no other meaning without a listener. The
// launcher makes one filter of both (bpfcache). No other program knows this form.
func pulledProfile(r Profile, defaults SeccompDefaults, files Files, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	if defaults.Pulled == nil {
		return nil, errdefs.FailedPrecondition("seccomp: the runtime of the pod does not support profile_type OCI")
	}
	body, err := defaults.Pulled(r.pulled)
	if err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	profile := new(specs.LinuxSeccomp)
	if err := json.Unmarshal(body, profile); err != nil {
		return nil, errdefs.Internal("seccomp: profile %s: %w", r.pulled, err)
	}
	if hasListener(profile) { // the store refuses it, too
		return nil, errdefs.Internal("seccomp: profile %s has a listener", r.pulled)
	}
	addPlainDenial(profile)
	base, err := baseProfile(r.base, defaults, files, spec)
	if err != nil {
		return nil, err
	}
	encoded, err := json.Marshal(base)
	profile.ListenerMetadata = string(encoded)
	return profile, err
}

func baseProfile(b *runtimeapi.SecurityProfileBase, defaults SeccompDefaults, files Files, spec *specs.Spec) (
	*specs.LinuxSeccomp, error,
) {
	if b.GetType() == runtimeapi.SecurityProfileBase_RuntimeDefault {
		base, err := defaultProfile(defaults, files, spec)
		if err == nil && hasListener(base) {
			return nil, errdefs.FailedPrecondition("seccomp: the node's default profile has a listener, so it cannot be a base")
		}
		return base, err
	}
	path := strings.TrimPrefix(b.GetLocalhostRef(), localhostPrefix)
	base, err := localhostProfile(path, files, spec)
	if err == nil && hasListener(base) {
		return nil, errdefs.InvalidArgument("seccomp: base profile %s has a listener", path)
	}
	return base, err
}

func hasListener(p *specs.LinuxSeccomp) bool {
	return p.ListenerPath != "" || p.DefaultAction == specs.ActNotify ||
		slices.ContainsFunc(p.Syscalls, func(c specs.LinuxSyscall) bool { return c.Action == specs.ActNotify })
}

func localhostProfile(ref string, files Files, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	if !path.IsAbs(ref) {
		return nil, errdefs.InvalidArgument("seccomp: localhost profile %q is not an absolute path", ref)
	}
	body, err := files.ReadProfile(ref)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.InvalidArgument("seccomp: localhost profile %s does not exist", ref)
	}
	if errdefs.IsBadPath(err) {
		return nil, errdefs.InvalidArgument("seccomp: localhost profile %.300q: %w", ref, err)
	}
	if err != nil {
		return nil, fmt.Errorf("seccomp: read localhost profile %s: %w", ref, err)
	}
	profile, err := parseProfile(body, spec)
	if err != nil {
		return nil, errdefs.InvalidArgument("seccomp: localhost profile %s: %w", ref, err)
	}
	return profile, nil
}

// nodeProfile reads the profile that the node has for RuntimeDefault. A change of the request
// cannot help.
func nodeProfile(path string, files Files, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	profile, err := localhostProfile(path, files, spec)
	if err != nil {
		return nil, errdefs.FailedPrecondition("the node's default profile: %v", err)
	}
	return profile, nil
}

// CheckProfileFile returns why a file cannot be the node's profile for RuntimeDefault.
func CheckProfileFile(path string, files Files) error {
	_, err := nodeProfile(path, files, &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}})
	return err
}

// parseProfile reads a profile in Docker's JSON form, a superset of the runtime-spec's, and
// resolves its conditions. It refuses an empty profile, which is more likely a broken file than
// intended.
func parseProfile(body []byte, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	var config seccomp.Seccomp
	if err := json.Unmarshal(body, &config); err != nil {
		return nil, err
	}
	for i, call := range config.Syscalls {
		if call == nil { // LoadProfile would follow the pointer
			return nil, fmt.Errorf("syscalls[%d] is null", i)
		}
	}
	profile, err := seccomp.LoadProfile(string(body), spec)
	if err != nil {
		return nil, err
	}
	if profile == nil {
		return nil, errors.New("it has neither defaultAction nor syscalls")
	}
	if profile.ListenerPath == "" {
		profile.ListenerMetadata = "" // see pulledProfile
	}
	addPlainDenial(profile)
	return profile, checkProfile(profile)
}

// addPlainDenial adds a rule without conditions for a call of all architectures, if a profile
// permits by default. Without such a rule, libseccomp 2.5 makes programs that permit every call of
// x86-64: if the profile lists x32, has rules with conditions, and all of its other rules are for
// calls of other architectures, such as umount. The call has no function since Linux 6.7.
func addPlainDenial(p *specs.LinuxSeccomp) {
	const call = "lookup_dcookie"
	permits := func(a specs.LinuxSeccompAction) bool {
		return a == specs.ActAllow || a == specs.ActLog || a == specs.ActTrace
	}
	denied := func(s specs.LinuxSyscall) bool {
		return slices.Contains(s.Names, call) && len(s.Args) == 0 && !permits(s.Action)
	}
	if !permits(p.DefaultAction) || slices.ContainsFunc(p.Syscalls, denied) {
		return
	}
	errno := uint(unix.ENOSYS)
	p.Syscalls = append(p.Syscalls, specs.LinuxSyscall{Names: []string{call}, Action: specs.ActErrno, ErrnoRet: &errno})
}

// checkProfile refuses words that libcontainer does not support. Otherwise the launch would fail
// with an internal error.
func checkProfile(p *specs.LinuxSeccomp) error {
	if !seccompActions[p.DefaultAction] {
		return fmt.Errorf("unknown defaultAction %q", p.DefaultAction)
	}
	for _, call := range p.Syscalls {
		if !seccompActions[call.Action] {
			return fmt.Errorf("unknown action %q for %s", call.Action, strings.Join(call.Names, ", "))
		}
		for _, arg := range call.Args {
			if !seccompOperators[arg.Op] {
				return fmt.Errorf("unknown operator %q for %s", arg.Op, strings.Join(call.Names, ", "))
			}
		}
	}
	return nil
}

var seccompActions = map[specs.LinuxSeccompAction]bool{
	specs.ActKill: true, specs.ActKillProcess: true, specs.ActKillThread: true, specs.ActTrap: true, specs.ActErrno: true,
	specs.ActTrace: true, specs.ActAllow: true, specs.ActLog: true, specs.ActNotify: true,
}

var seccompOperators = map[specs.LinuxSeccompOperator]bool{
	specs.OpNotEqual: true, specs.OpLessThan: true, specs.OpLessEqual: true, specs.OpEqualTo: true,
	specs.OpGreaterEqual: true, specs.OpGreaterThan: true, specs.OpMaskedEqual: true,
}
