package debug

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"time"
)

// removed stands for a value that is not known to be harmless. Equal values have equal digits
// behind it in one bundle, so that a reader can still follow an object through the log. The digits
// depend on a key, so that nobody can test a guess.
const removed = "REMOVED"

// masker keeps text that is known to be harmless: numbers, addresses, words in berth's programs,
// and names of this node's objects. It removes everything else. It does not search for secrets,
// because a list of their forms would miss a new form.
type masker struct {
	key      []byte          // of the digits behind removed
	literals []byte          // read-only data of the programs
	words    map[string]bool // words in it
	names    map[string]bool // names of pods, containers, images, paths
	phrases  *sync.Map       // by text: whether literals contains it
	units    *sync.Map       // by word: the text that replaces it
}

// newMasker takes the words of the given programs. If they are missing, it removes all words.
func newMasker(programs ...string) (*masker, error) {
	m := &masker{key: make([]byte, 32), words: map[string]bool{}, names: map[string]bool{},
		phrases: new(sync.Map), units: new(sync.Map)}
	m.learn([]byte(kernelWords))
	if _, err := rand.Read(m.key); err != nil {
		return nil, fmt.Errorf("make a key for removed values: %w", err)
	}
	var failed error
	for _, path := range programs {
		literals, err := readOnlyData(path)
		failed = errors.Join(failed, err)
		m.learn(literals)
	}
	return m, failed
}

// kernelWords are words of the kernel's log and of mount options that berth's programs lack.
const kernelWords = `default relatime lazytime noatime nodiratime errors remount discard barrier inode64 journal quota prjquota
	usrquota grpquota seclabel nsdelegate memory_recursiveprot hugetlb pagesize udev devtmpfs debugfs tracefs securityfs
	fuse fusectl binfmt ext4 xfs btrfs subvol subvolid compress zstd overlay lowerdir upperdir workdir redirect volatile
	invoked killer oom_kill_process constraint nodemask cpuset mems_allowed global_oom task_memcg killed total anon rss
	shmem metacopy pgtables oom_score_adj reaped blocked seconds tainted hung task lockup segfault sector buffer aborting
	corrupted warning checksum orphan bridge promiscuous forwarding disabled martian conntrack table dropping packet
	apparmor denied operation profile audit here cut trace`

// readOnlyData returns the section of a program that has its string literals.
func readOnlyData(path string) ([]byte, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the texts of %s: %w", path, err)
	}
	defer f.Close()
	section := f.Section(".rodata")
	if section == nil {
		return nil, fmt.Errorf("read the texts of %s: it has no section .rodata", path)
	}
	return section.Data()
}

var (
	literalWord = regexp.MustCompile(`[A-Za-z][A-Za-z0-9]*`)
	// camel matches the parts of CamelCase, and words in capitals.
	camel = regexp.MustCompile(`[A-Z]?[a-z]+|[A-Z]+|[0-9]+`)
)

const (
	maxWord  = 24 // longer words of programs are binary data
	minCamel = 3  // shorter parts of CamelCase occur by chance
)

// learn adds the words of string literals.
func (m *masker) learn(literals []byte) {
	m.literals = append(m.literals, literals...)
	for _, word := range literalWord.FindAll(literals, -1) {
		if len(word) > maxWord {
			continue
		}
		m.words[string(bytes.ToLower(word))] = true
		for _, part := range camel.FindAll(word, -1) {
			if len(part) >= minCamel {
				m.words[string(bytes.ToLower(part))] = true
			}
		}
	}
}

// with returns a masker that also knows these names.
func (m *masker) with(names ...string) *masker {
	more := *m
	more.names, more.units = maps.Clone(m.names), new(sync.Map)
	for _, name := range names {
		more.names[name] = true
		for part := range strings.FieldsFuncSeq(name, isPathJoint) {
			more.names[part] = true
		}
	}
	return &more
}

// secret returns the text that replaces a removed value.
func (m *masker) secret(value string) string {
	mac := hmac.New(sha256.New, m.key)
	mac.Write([]byte(value))
	return removed + "-" + hex.EncodeToString(mac.Sum(nil)[:3])
}

var (
	pemBlock = regexp.MustCompile(`(?s)-----BEGIN .*?(-----END [^\n-]*-----|$)`)
	// namedSecret matches the name of a value that may consist of ordinary words. A colon also
	// separates the parts of error texts, so before a colon only names of passwords count.
	namedSecret = regexp.MustCompile(`(?i)([\w.-]*(?:passw|passphrase|\bpass\b|psk|secret|credential|pwd)[\w.-]*\\*["']?\s*[:=]|` +
		`[\w.-]*(?:token|key|auth|cookie|sig|pin|bearer|session|login)[\w.-]*(?:\\*["']\s*[:=]|\s*=)|` +
		`\b(?:authorization|proxy-authorization|cookie|set-cookie|x-registry-auth)\s*:|` +
		`(?:^|\s)--?[\w-]*(?:pass|psk|secret|credential|pwd|token|key|auth|cookie)[\w-]*\s)\s*\S`)
	url  = regexp.MustCompile(`\w[\w+.-]*://\S+`)
	unit = regexp.MustCompile(`\S+`)
)

// text returns free text without unknown words. A value after the name of a secret is removed up to
// the end of the line.
func (m *masker) text(s string) string {
	s = pemBlock.ReplaceAllStringFunc(s, m.secret)
	var b strings.Builder
	for line := range strings.Lines(s) {
		rest := ""
		if at := namedSecret.FindStringIndex(line); at != nil {
			value := strings.TrimRight(line[at[1]-1:], "\n")
			line, rest = line[:at[1]-1], m.secret(value)+"\n"
		}
		line = url.ReplaceAllStringFunc(line, m.location)
		b.WriteString(unit.ReplaceAllStringFunc(line, m.unit) + rest)
	}
	if !strings.HasSuffix(s, "\n") {
		return strings.TrimSuffix(b.String(), "\n")
	}
	return b.String()
}

// location removes credentials, query and fragment from a URL. A password may contain any
// character, so user and password end at the last @.
func (m *masker) location(s string) string {
	scheme, rest, _ := strings.Cut(s, "://")
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		rest = m.secret(rest[:at]) + "@" + rest[at+1:]
	}
	if at := strings.IndexAny(rest, "?#;"); at >= 0 {
		end := len(strings.TrimRight(rest, `"'):,.`))
		rest = rest[:at+1] + m.secret(rest[at:]) + rest[max(end, at+1):]
	}
	return scheme + "://" + rest
}

const (
	opening = "\"'`([{<\\"
	closing = "\"'`)]}>,;:.!?\\"
)

// unit returns a sequence of characters without blanks, or the text that replaces it. The results
// are kept, because logs repeat most sequences.
func (m *masker) unit(s string) string {
	if known, ok := m.units.Load(s); ok {
		return known.(string)
	}
	masked := m.maskUnit(s)
	m.units.Store(s, masked)
	return masked
}

func (m *masker) maskUnit(s string) string {
	body := strings.TrimRight(strings.TrimLeft(s, opening), closing)
	if body == "" {
		if len(s) > 3 { // a long sequence of punctuation
			return m.secret(s)
		}
		return s
	}
	at := strings.Index(s, body)
	if len(s)-len(body) > 6 {
		return m.secret(s)
	}
	if m.harmless(body) {
		return s
	}
	if key, value, found := strings.Cut(body, "="); found && m.harmless(key) {
		return s[:at] + key + "=" + m.unit(value) + s[at+len(body):]
	}
	if scheme, place, found := strings.Cut(body, "://"); found && m.harmless(scheme) {
		return s[:at] + scheme + "://" + m.path(place) + s[at+len(body):]
	}
	if strings.HasPrefix(body, "/") {
		return s[:at] + m.path(body) + s[at+len(body):]
	}
	return s[:at] + m.secret(body) + s[at+len(body):]
}

var component = regexp.MustCompile(`[^/:@?#;]+`)

// path returns a path or a URL without its scheme, with each unknown component removed.
func (m *masker) path(s string) string {
	return component.ReplaceAllStringFunc(s, func(part string) string {
		if m.harmless(part) {
			return part
		}
		return m.secret(part)
	})
}

var (
	placeholder = regexp.MustCompile(`^` + removed + `-[0-9a-f]{6}$`)
	number      = regexp.MustCompile(`^[+-]?[0-9]{1,12}(\.[0-9]{1,9})?(%|[kKMGT]?i?B|[num]?s)?$`)
	release     = regexp.MustCompile(`^(v|go)?[0-9]{1,4}(\.[0-9]{1,6}){1,3}$`)
	device      = regexp.MustCompile(`^(eth|loop|dm-|md|cpu|[sv]d[a-z])[0-9]{0,3}$`)
	moment      = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9:.]{8,18}(Z|[+-][0-9:]{4,5})?)?$`)
	digest      = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	address     = regexp.MustCompile(`^0x[0-9a-f]{1,16}$`)
)

// shaped returns whether s is a number, a time, a version, an address or a digest.
func shaped(s string) bool {
	for _, shape := range []*regexp.Regexp{number, release, device, moment, digest, address} {
		if shape.MatchString(s) {
			return true
		}
	}
	if _, err := time.ParseDuration(s); err == nil && len(s) <= 16 {
		return true
	}
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	if _, err := netip.ParseAddrPort(s); err == nil {
		return true
	}
	_, err := netip.ParsePrefix(s)
	return err == nil
}

func isPathJoint(r rune) bool { return r == '/' || r == ':' || r == '@' }
func isJoint(r rune) bool     { return strings.ContainsRune("/:-_.,=+~*[]", r) }

// harmless returns whether s, or each of its parts, is known. Parts of one or two letters occur in
// every program, so only one such part is accepted.
func (m *masker) harmless(s string) bool {
	if m.names[s] || m.allKnown(s) || shaped(s) || placeholder.MatchString(s) {
		return true
	}
	for part := range strings.FieldsFuncSeq(s, isPathJoint) {
		if !m.names[part] && !shaped(part) && !m.allKnown(part) {
			return false
		}
	}
	return strings.ContainsFunc(s, isPathJoint)
}

// allKnown returns whether s consists of known words with single characters between them.
func (m *masker) allKnown(s string) bool {
	short := 0
	for part := range strings.FieldsFuncSeq(s, isJoint) {
		if len(part) < minCamel && len(part) < len(s) {
			short++
		}
		if short > 1 || !m.word(part) && !m.names[part] {
			return false
		}
	}
	return true
}

// word returns whether s is a word of the programs, in CamelCase too, or a short number.
func (m *masker) word(s string) bool {
	if number.MatchString(s) && len(s) <= 5 {
		return true
	}
	if m.words[strings.ToLower(s)] {
		return true
	}
	parts := camel.FindAllString(s, -1)
	if strings.Join(parts, "") != s || len(parts) < 2 || len(parts) > 6 {
		return false
	}
	for _, part := range parts {
		if len(part) < minCamel || !m.words[strings.ToLower(part)] || part[0] <= '9' {
			return false
		}
	}
	return true
}

// literal returns whether the programs contain s as a whole. The search takes a millisecond, so its
// result is kept.
func (m *masker) literal(s string) bool {
	if len(s) < minLiteral {
		return false
	}
	if found, searched := m.phrases.Load(s); searched {
		return found.(bool)
	}
	found := bytes.Contains(m.literals, []byte(s))
	m.phrases.Store(s, found)
	return found
}

const minLiteral = 8 // shorter texts occur by chance
