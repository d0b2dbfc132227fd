package verify

import (
	"fmt"
	"slices"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/creds"
	"github.com/moby/sys/capability"
)

// capabilities are the sets of a process, as bits.
type capabilities struct{ inheritable, permitted, effective, bounding, ambient uint64 }

// identity is what decides about the rights of a process.
type identity struct {
	uids, gids []uint32 // real, effective, saved, filesystem
	groups     []uint32
	caps       capabilities
	noNewPrivs bool
}

// bits returns a set of the images, two words of 32 bits.
func bits(words []uint32) (set uint64) {
	for i, word := range words[:min(len(words), 2)] {
		set |= uint64(word) << (32 * i)
	}
	return set
}

// specBits returns the set of capabilities with the names of a spec.
func specBits(names []string) (set uint64) {
	for _, c := range capability.ListKnown() {
		if slices.Contains(names, "CAP_"+strings.ToUpper(c.String())) {
			set |= 1 << uint(c)
		}
	}
	return set
}

// names returns the names of the capabilities of a set, as in a spec.
func names(set uint64) string {
	var all []string
	for i := range 64 {
		if set&(1<<i) == 0 {
			continue
		}
		name := fmt.Sprintf("capability %d", i)
		if slices.Contains(capability.ListKnown(), capability.Cap(i)) {
			name = "CAP_" + strings.ToUpper(capability.Cap(i).String())
		}
		all = append(all, name)
	}
	if all == nil {
		return "none"
	}
	return strings.Join(all, ",")
}

// may reports whether the spec's process has a capability after its execve.
func (e Expected) may(c capability.Cap) bool { return e.started().effective&(1<<uint(c)) != 0 }

// started returns the capabilities of the spec's process after its execve. A user other than root
// keeps only the ambient ones (capabilities(7)).
func (e Expected) started() capabilities {
	spec := e.Spec.Process.Capabilities
	if spec == nil {
		return capabilities{}
	}
	c := capabilities{
		inheritable: specBits(spec.Inheritable), permitted: specBits(spec.Permitted), effective: specBits(spec.Effective),
		bounding: specBits(spec.Bounding), ambient: specBits(spec.Ambient),
	}
	if e.Spec.Process.User.UID != 0 {
		c.ambient &= c.permitted & c.inheritable
		c.permitted, c.effective = c.ambient, c.ambient
	}
	return c
}

// checkIdentity compares the rights of a process with those of the spec.
func (r *Report) checkIdentity(process string, id identity, e Expected) {
	user := e.Spec.Process.User
	if !e.may(capability.CAP_SETUID) {
		for _, uid := range id.uids {
			if uid != user.UID {
				r.differ(process+": user", fmt.Sprint(uid), fmt.Sprint(user.UID))
				break
			}
		}
	}
	if !e.may(capability.CAP_SETGID) {
		for _, gid := range id.gids {
			if gid != user.GID {
				r.differ(process+": group", fmt.Sprint(gid), fmt.Sprint(user.GID))
				break
			}
		}
		for _, gid := range id.groups {
			if gid != user.GID && !slices.Contains(user.AdditionalGids, gid) {
				r.differ(process+": supplementary group", fmt.Sprint(gid), fmt.Sprint(user.AdditionalGids))
				break
			}
		}
	}
	if e.Spec.Process.NoNewPrivileges && !id.noNewPrivs {
		r.differ(process+": no_new_privs", "not set", "set")
	}
	r.checkCapabilities(process, id.caps, e)
}

func (r *Report) checkCapabilities(process string, have capabilities, e Expected) {
	start := e.started()
	inheritable := start.inheritable | start.permitted
	if e.may(capability.CAP_SETPCAP) {
		inheritable |= start.bounding
	}
	for _, set := range []struct {
		name       string
		have, want uint64
	}{
		{"bounding", have.bounding, start.bounding},
		{"permitted", have.permitted, start.permitted},
		{"effective", have.effective, start.permitted},
		{"ambient", have.ambient, start.permitted & inheritable},
		{"inheritable", have.inheritable, inheritable},
	} {
		if more := set.have &^ set.want; more != 0 {
			r.differ(fmt.Sprintf("%s: %s capabilities", process, set.name), names(more)+" beyond the spec", names(set.want))
		}
	}
}

// checkCreds compares the credentials of a thread with the spec.
func (c *check) checkCreds(process string, cr *creds.CredsEntry) {
	if cr == nil {
		c.differ(process+": credentials", "none", "those of the spec")
		return
	}
	for _, set := range [][]uint32{cr.GetCapInh(), cr.GetCapPrm(), cr.GetCapEff(), cr.GetCapBnd(), cr.GetCapAmb()} {
		if len(set) != 2 { // CRIU keeps what it has where a word is missing
			c.differ(process+": capabilities", fmt.Sprintf("%d words", len(set)), "2")
		}
	}
	c.checkIdentity(process, identity{
		uids:   []uint32{cr.GetUid(), cr.GetEuid(), cr.GetSuid(), cr.GetFsuid()},
		gids:   []uint32{cr.GetGid(), cr.GetEgid(), cr.GetSgid(), cr.GetFsgid()},
		groups: cr.GetGroups(), noNewPrivs: cr.GetNoNewPrivs() == 1,
		caps: capabilities{
			inheritable: bits(cr.GetCapInh()), permitted: bits(cr.GetCapPrm()), effective: bits(cr.GetCapEff()),
			bounding: bits(cr.GetCapBnd()), ambient: bits(cr.GetCapAmb()),
		},
	}, c.e)
	if cr.GetSecbits() != 0 && !c.e.may(capability.CAP_SETPCAP) {
		c.differ(process+": securebits", fmt.Sprintf("%#x", cr.GetSecbits()), "0")
	}
	c.checkLabels(process, cr)
}

// checkLabels compares the labels of AppArmor and SELinux with those of the config.
func (c *check) checkLabels(process string, cr *creds.CredsEntry) {
	want := c.e.Spec.Process.ApparmorProfile
	if c.e.Spec.Process.SelinuxLabel != "" {
		want = c.e.Spec.Process.SelinuxLabel
	}
	if have := strings.TrimSuffix(cr.GetLsmProfile(), " (enforce)"); have != want {
		c.differ(process+": AppArmor profile or SELinux label", quoted(have), quoted(want))
	}
	if cr.GetLsmSockcreate() != "" {
		c.differ(process+": SELinux label of sockets", cr.GetLsmSockcreate(), "none")
	}
	if len(cr.GetApparmorData()) > 0 {
		c.differ(process+": AppArmor policy", "one of its own", "none")
	}
}

func quoted(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
