package rules

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Rules of iptables-legacy (x_tables) are not visible through nftables. This file reads them as
// iptables does, by two socket options: the size of a table, and all of its rules
// (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h).

// legacyFamily describes the layout of a family's rules. Offsets and sizes are in bytes, on 64-bit
// architectures.
type legacyFamily struct {
	tool     string // the program that changes the rules
	names    string // file with the names of the namespace's tables
	domain   int
	level    int
	address  int // size of an address; a rule begins with source, destination and their masks
	ruleSize int // struct ipt_entry, ip6t_entry
	targetAt int // offset of the field with the target's offset; the rule's total size follows it
}

var legacyFamilies = []legacyFamily{
	{"iptables-legacy", "/proc/thread-self/net/ip_tables_names", unix.AF_INET, unix.SOL_IP, 4, 112, 88},
	{"ip6tables-legacy", "/proc/thread-self/net/ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 16, 168, 140},
}

const (
	legacyGetInfo    = 64 // IPT_SO_GET_INFO
	legacyGetEntries = 65 // IPT_SO_GET_ENTRIES

	legacyInfoSize   = 84 // struct ipt_getinfo: name, hooks, 5 entries, 5 policies, number and size of all rules
	legacyPolicies   = 56
	legacyTotalSize  = 80
	legacyHeaderSize = 40 // struct ipt_get_entries: name, size, alignment
	legacySize       = 32

	legacyTable   = "filter"
	legacyForward = 2       // NF_INET_FORWARD
	legacyMost    = 1 << 28 // limit of a table's size in bytes

	// size of struct xt_entry_target; the name is at 2, and a standard target's verdict follows the
	// struct
	legacyTarget = 32
	legacyDrop   = -1     // -NF_DROP - 1
	maskedNames  = 4 * 16 // names of the incoming and outgoing interface, and their masks
	ifNameSize   = 16     // IFNAMSIZ
)

// blockingLegacy implements Blocking for iptables-legacy. It reads only tables that exist, because
// a request would create the table.
func blockingLegacy(bridge string, subnets []netip.Prefix) (all []Blocker, err error) {
	for _, f := range legacyFamilies {
		if !hasFamily(subnets, f.address == 4) {
			continue
		}
		table, err := f.read()
		if err != nil {
			return nil, fmt.Errorf("read the rules of %s: %w", f.tool, err)
		}
		if table == nil {
			continue
		}
		drops, hasRule, err := f.inspect(table, bridge, subnets)
		if err != nil {
			return nil, fmt.Errorf("read the rules of %s: %w", f.tool, err)
		}
		if drops && !hasRule {
			all = append(all, Blocker{Chain: f.tool + " " + legacyTable + " FORWARD", Tool: f.tool})
		}
	}
	return all, nil
}

// legacyRules are the rules of a table in the kernel's layout, with the offset of FORWARD's policy.
type legacyRules struct {
	rules  []byte
	policy int
}

// read returns the rules of the table, or nil if the namespace has no such table.
func (f *legacyFamily) read() (*legacyRules, error) {
	names, err := os.ReadFile(f.names)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !slices.Contains(strings.Fields(string(names)), legacyTable) {
		return nil, nil
	}
	socket, err := unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // any type of socket works
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil // ipv6.disable=1
	}
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer unix.Close(socket)
	for range Attempts {
		table, err := f.ask(socket)
		if !errors.Is(err, unix.EAGAIN) { // EAGAIN: the table's size has changed
			return table, err
		}
	}
	return nil, unix.EAGAIN
}

func (f *legacyFamily) ask(socket int) (*legacyRules, error) {
	info := make([]byte, legacyInfoSize)
	copy(info, legacyTable)
	if err := getsockopt(socket, f.level, legacyGetInfo, info); err != nil {
		return nil, err
	}
	size := binary.NativeEndian.Uint32(info[legacyTotalSize:])
	if size > legacyMost {
		return nil, fmt.Errorf("unsupported size of %d bytes", size)
	}
	entries := make([]byte, legacyHeaderSize+int(size))
	copy(entries, legacyTable)
	binary.NativeEndian.PutUint32(entries[legacySize:], size)
	if err := getsockopt(socket, f.level, legacyGetEntries, entries); err != nil {
		return nil, err
	}
	return &legacyRules{entries[legacyHeaderSize:],
		int(binary.NativeEndian.Uint32(info[legacyPolicies+4*legacyForward:]))}, nil
}

// getsockopt fills data, which begins with the request.
func getsockopt(socket, level, option int, data []byte) error {
	size := uint32(len(data))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&data[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return os.NewSyscallError("getsockopt", errno)
	}
	return nil
}

var errLegacyTorn = errors.New("unexpected layout")

// inspect reports whether FORWARD's policy is DROP, and whether a rule of the table matches the
// bridge or a subnet.
func (f *legacyFamily) inspect(t *legacyRules, bridge string, subnets []netip.Prefix) (drops, hasRule bool, err error) {
	seen := false
	for at := 0; at < len(t.rules); {
		rule := t.rules[at:]
		if len(rule) < f.ruleSize {
			return false, false, errLegacyTorn
		}
		target := int(binary.NativeEndian.Uint16(rule[f.targetAt:]))
		next := int(binary.NativeEndian.Uint16(rule[f.targetAt+2:]))
		if target < f.ruleSize || next < target+legacyTarget || next > len(rule) {
			return false, false, errLegacyTorn
		}
		if at == t.policy {
			seen, drops = true, isLegacyDrop(rule[target:next])
		}
		hasRule = hasRule || f.matches(rule, bridge, subnets)
		at += next
	}
	if !seen {
		return false, false, errLegacyTorn
	}
	return drops, hasRule, nil
}

// isLegacyDrop reports whether a target is the standard target (without a name) with the verdict
// DROP.
func isLegacyDrop(target []byte) bool {
	return len(target) >= legacyTarget+4 && target[2] == 0 &&
		int32(binary.NativeEndian.Uint32(target[legacyTarget:])) == legacyDrop
}

// matches reports whether a rule matches the interface's name or a prefix of it, or an address of a
// subnet.
func (f *legacyFamily) matches(rule []byte, bridge string, subnets []netip.Prefix) bool {
	names := rule[4*f.address:][:maskedNames]
	for i := range 2 {
		if isMaskedName(names[i*ifNameSize:][:ifNameSize], names[(i+2)*ifNameSize:][:ifNameSize], bridge) {
			return true
		}
	}
	for i := range 2 {
		address, mask := rule[i*f.address:][:f.address], rule[(i+2)*f.address:][:f.address]
		if slices.ContainsFunc(subnets, func(s netip.Prefix) bool { return isMaskedSubnet(address, mask, s) }) {
			return true
		}
	}
	return false
}

// isMaskedName compares as the kernel does. An empty mask matches any interface.
func isMaskedName(name, mask []byte, ifName string) bool {
	var wanted [ifNameSize]byte
	copy(wanted[:], ifName)
	some := false
	for i := range wanted {
		if mask[i] == 0 {
			continue
		}
		some = true
		if (name[i]^wanted[i])&mask[i] != 0 {
			return false
		}
	}
	return some
}

func isMaskedSubnet(address, mask []byte, s netip.Prefix) bool {
	want := s.Masked().Addr().AsSlice()
	if len(want) != len(address) || !bytes.Equal(address, want) {
		return false
	}
	for bit := range 8 * len(mask) {
		if on := mask[bit/8]&(0x80>>(bit%8)) != 0; on != (bit < s.Bits()) {
			return false
		}
	}
	return true
}
