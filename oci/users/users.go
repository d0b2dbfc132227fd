// Package users determines the user and groups of a container's processes from the request, the
// image's USER, and the image's /etc/passwd and /etc/group.
//
// # Contract
//
// The package is pure. The files are untrusted, so malformed entries are ignored, and ambiguous IDs
// are refused. All errors are InvalidArgument, since they come from the request or the image.
package users

import (
	"bytes"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// MaxFile is the size limit of /etc/passwd and /etc/group in bytes. Callers refuse larger files
// (CVE-2026-47262).
const MaxFile = 4 << 20

// maxID is the highest user or group ID, as in containerd and runc. The kernel accepts higher IDs,
// but 4294967295 means "no change" to system calls, and other runtimes truncated 4294967296 to 0
// (CVE-2024-40635).
const maxID = math.MaxInt32

// maxGroups is the kernel's limit, NGROUPS_MAX.
const maxGroups = 65536

// User is the identity of a process in a container. [Resolve] finds it.
type User struct {
	UID, GID uint32
	// Groups are all groups of the process including GID, ascending and distinct.
	Groups []uint32
	Home   string // from passwd; "" if the user has no entry
}

// Request is a requested identity. Use [ContainerRequest] or [SandboxRequest].
type Request struct {
	UID, GID  *int64 // run_as_user, run_as_group
	Username  string // run_as_username
	ImageUser string // the image's USER, used if neither UID nor Username is set
	Groups    []int64
	Policy    runtimeapi.SupplementalGroupsPolicy // KEP-3619
}

// ContainerRequest returns the identity that a container requests.
func ContainerRequest(sc *runtimeapi.LinuxContainerSecurityContext, imageUser string) Request {
	return Request{
		UID:       int64Pointer(sc.GetRunAsUser()),
		GID:       int64Pointer(sc.GetRunAsGroup()),
		Username:  sc.GetRunAsUsername(),
		ImageUser: imageUser,
		Groups:    sc.GetSupplementalGroups(),
		Policy:    sc.GetSupplementalGroupsPolicy(),
	}
}

// SandboxRequest returns the identity that a pod requests for its pause.
func SandboxRequest(sc *runtimeapi.LinuxSandboxSecurityContext, imageUser string) Request {
	return Request{
		UID:       int64Pointer(sc.GetRunAsUser()),
		GID:       int64Pointer(sc.GetRunAsGroup()),
		ImageUser: imageUser,
		Groups:    sc.GetSupplementalGroups(),
		Policy:    sc.GetSupplementalGroupsPolicy(),
	}
}

func int64Pointer(v *runtimeapi.Int64Value) *int64 {
	if v == nil {
		return nil
	}
	n := v.GetValue()
	return &n
}

// Resolve finds the requested identity in the image's /etc/passwd and /etc/group, which are nil if
// missing. A number is always an ID, even if an entry has the number as its name. A name must be in
// the files. The primary group is run_as_group, the group part of USER, the user's group in passwd,
// or 0, in this order. With policy Merge the user also gets the groups whose member lists contain
// the user.
//
// All errors are InvalidArgument, because they come from the request or the image.
func Resolve(passwd, group []byte, req Request) (User, error) {
	if err := req.check(); err != nil {
		return User{}, err
	}
	name, groupName, err := req.names()
	if err != nil {
		return User{}, err
	}
	account, err := findAccount(passwd, name)
	if err != nil {
		return User{}, err
	}
	u := User{UID: account.uid, GID: account.gid, Home: account.home}
	if groupName != "" {
		if u.GID, err = findGroup(group, groupName); err != nil {
			return User{}, err
		}
	}
	u.Groups, err = allGroups(group, account.name, u.GID, req)
	return u, err
}

// CRI returns the identity for ContainerStatus.
func (u User) CRI() *runtimeapi.ContainerUser {
	linux := &runtimeapi.LinuxContainerUser{Uid: int64(u.UID), Gid: int64(u.GID)}
	for _, g := range u.Groups {
		linux.SupplementalGroups = append(linux.SupplementalGroups, int64(g))
	}
	return &runtimeapi.ContainerUser{Linux: linux}
}

// Spec returns the identity for a runtime-spec.
func (u User) Spec() specs.User {
	return specs.User{UID: u.UID, GID: u.GID, AdditionalGids: slices.Clone(u.Groups)}
}

// HomeVariable returns the value of HOME. It returns "/" unless the home is a plain absolute path.
// Other values could reach programs that split lines (CVE-2022-4318).
func (u User) HomeVariable() string {
	if !strings.HasPrefix(u.Home, "/") || strings.ContainsFunc(u.Home, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return "/"
	}
	return u.Home
}

func (req Request) check() error {
	if req.UID != nil && req.Username != "" {
		return errdefs.InvalidArgument("run_as_user %d and run_as_username %q exclude each other", *req.UID, req.Username)
	}
	if req.GID != nil && req.UID == nil && req.Username == "" {
		return errdefs.InvalidArgument("run_as_group %d needs run_as_user or run_as_username", *req.GID)
	}
	if req.UID != nil && !validID(*req.UID) {
		return errdefs.InvalidArgument("run_as_user %d is not between 0 and %d", *req.UID, maxID)
	}
	if req.GID != nil && !validID(*req.GID) {
		return errdefs.InvalidArgument("run_as_group %d is not between 0 and %d", *req.GID, maxID)
	}
	for _, g := range req.Groups {
		if !validID(g) {
			return errdefs.InvalidArgument("supplemental_groups: %d is not between 0 and %d", g, maxID)
		}
	}
	switch req.Policy {
	case runtimeapi.SupplementalGroupsPolicy_Merge, runtimeapi.SupplementalGroupsPolicy_Strict:
		return nil
	}
	return errdefs.InvalidArgument("supplemental_groups_policy: unknown value %d", req.Policy)
}

func validID(n int64) bool { return n >= 0 && n <= maxID }

// names returns the user and the group as text. The group is "" if it is not requested.
func (req Request) names() (user, group string, err error) {
	switch {
	case req.UID != nil:
		user = strconv.FormatInt(*req.UID, 10)
	case req.Username != "":
		user = req.Username
	default:
		user, group, _ = strings.Cut(req.ImageUser, ":")
		if user == "" {
			user = "0"
		}
	}
	if req.GID != nil {
		group = strconv.FormatInt(*req.GID, 10)
	}
	if strings.Contains(user, ":") || strings.Contains(group, ":") {
		return "", "", errdefs.InvalidArgument("user %q: more than one ':'", user+":"+group)
	}
	return user, group, nil
}

// parseID parses text that may be an ID. ok is false for a name. A number that is not a valid ID is
// an error.
func parseID(text string) (id uint32, ok bool, err error) {
	digits := strings.TrimLeft(text, "+-")
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return 0, false, nil
	}
	n, err := strconv.ParseUint(text, 10, 64) // accepts no sign
	if err != nil || n > maxID {
		return 0, false, errdefs.InvalidArgument("ID %q is not between 0 and %d", text, maxID)
	}
	return uint32(n), true, nil
}

// account is an entry of passwd, or an ID without an entry.
type account struct {
	name     string // "" without an entry
	uid, gid uint32
	home     string
}

// findAccount returns the first entry of passwd with the given name or ID.
func findAccount(passwd []byte, user string) (account, error) {
	id, numeric, err := parseID(user)
	if err != nil {
		return account{}, err
	}
	for line := range bytes.Lines(passwd) {
		a, ok := parseAccount(line)
		if ok && (numeric && a.uid == id || !numeric && a.name == user) {
			return a, nil
		}
	}
	if !numeric {
		return account{}, errdefs.InvalidArgument("user %q is not in the image's /etc/passwd", user)
	}
	return account{uid: id}, nil
}

// parseAccount parses name:password:UID:GID:gecos:home:shell. It ignores a line whose IDs are not
// plain numbers in range, because an ID read as 0 would be root.
func parseAccount(line []byte) (account, bool) {
	fields := bytes.SplitN(bytes.TrimSpace(line), []byte(":"), 7)
	if len(fields) < 4 || len(fields[0]) == 0 || fields[0][0] == '#' {
		return account{}, false
	}
	uid, ok := entryID(fields[2])
	gid, ok2 := entryID(fields[3])
	if !ok || !ok2 {
		return account{}, false
	}
	a := account{name: string(fields[0]), uid: uid, gid: gid}
	if len(fields) > 5 {
		a.home = string(fields[5])
	}
	return a, true
}

func entryID(field []byte) (uint32, bool) {
	if len(field) > 20 {
		return 0, false
	}
	id, ok, err := parseID(string(field))
	return id, ok && err == nil
}

// parseGroup parses name:password:GID:member,member.
func parseGroup(line []byte) (name []byte, gid uint32, members []byte, ok bool) {
	fields := bytes.SplitN(bytes.TrimSpace(line), []byte(":"), 4)
	if len(fields) < 3 || len(fields[0]) == 0 || fields[0][0] == '#' {
		return nil, 0, nil, false
	}
	if gid, ok = entryID(fields[2]); !ok {
		return nil, 0, nil, false
	}
	if len(fields) == 4 {
		members = fields[3]
	}
	return fields[0], gid, members, true
}

func findGroup(file []byte, group string) (uint32, error) {
	id, numeric, err := parseID(group)
	if err != nil || numeric {
		return id, err
	}
	for line := range bytes.Lines(file) {
		if name, gid, _, ok := parseGroup(line); ok && string(name) == group {
			return gid, nil
		}
	}
	return 0, errdefs.InvalidArgument("group %q is not in the image's /etc/group", group)
}

// allGroups returns the primary group and the requested groups. If the policy is Merge, it adds the
// groups in the image's /etc/group that list the user.
func allGroups(file []byte, user string, primary uint32, req Request) ([]uint32, error) {
	groups := []uint32{primary}
	for _, g := range req.Groups {
		groups = append(groups, uint32(g))
	}
	if user != "" && req.Policy == runtimeapi.SupplementalGroupsPolicy_Merge {
		for line := range bytes.Lines(file) {
			_, gid, members, ok := parseGroup(line)
			if ok && isMember(members, user) {
				groups = append(groups, gid)
			}
		}
	}
	slices.Sort(groups)
	groups = slices.Compact(groups)
	if len(groups) > maxGroups {
		return nil, errdefs.InvalidArgument("user %q is in %d groups, the kernel allows %d", user, len(groups), maxGroups)
	}
	return groups, nil
}

func isMember(members []byte, user string) bool {
	for m := range bytes.SplitSeq(members, []byte(",")) {
		if string(m) == user {
			return true
		}
	}
	return false
}
