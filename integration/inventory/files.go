package inventory

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	shimproto "berth/shim/proto"
)

// place describes a part of a tree, and the properties of its files that are the same in every run.
type place struct {
	path *regexp.Regexp
	name func(path string) string
	tell func(path, below string, st *unix.Stat_t) (string, error)
}

var (
	rootPlaces = []place{
		{regexp.MustCompile(`^/images/(erofs/)?(layers|joins)/`), exactly, ofLayer},
		{regexp.MustCompile(`^/(bin|images/(erofs/)?empty-[a-z]+)/`), normalized, inside},
		{regexp.MustCompile(`^/rootfs/`), normalized, inside},
		{regexp.MustCompile(`^/images/partial/blobs/`), exactly, inside},
		{regexp.MustCompile(`^/network/`), reserved, unread},
		{regexp.MustCompile(`\.record$`), normalized, recorded},
		{regexp.MustCompile(`^/identity$`), normalized, sized}, // random content
		{regexp.MustCompile(``), normalized, normalizedText},
	}
	statePlaces = []place{
		{regexp.MustCompile(`^/c/[^/]+/exit$`), normalized, exited},
		{regexp.MustCompile(`^/(run-id|identity)$`), normalized, sized}, // random content
		{regexp.MustCompile(`^/oci/[^/]+/runc/`), normalized, unread},   // of runc, in random order
		{regexp.MustCompile(``), normalized, normalizedText},
	}
	logPlaces = []place{{regexp.MustCompile(``), normalized, logged}}
)

// addFiles adds the files of a tree, each with its type, mode, owner and content summary.
func addFiles(s Items, where, root string, places []place) {
	names := fileNames{}
	_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return nil // removed meanwhile; the caller repeats the inventory
		}
		below := strings.TrimPrefix(path, root)
		if isOutliving(below) {
			return nil
		}
		for _, p := range places {
			if p.path.MatchString(below) {
				if line, err := p.line(path, below, names); !errors.Is(err, fs.ErrNotExist) {
					s.Add("file "+where, line)
				}
				return nil
			}
		}
		return nil
	})
}

// line describes one file. The error wraps fs.ErrNotExist if the file no longer exists. Any other
// error becomes part of the line.
func (p place) line(path, below string, names fileNames) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if first := names.another(below, &st); first != "" {
		return p.name(below) + " is a hard link to " + p.name(first), nil
	}
	content, err := p.tell(path, below, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if err != nil {
		content = normalized(err.Error())
	}
	return strings.TrimSpace(fmt.Sprintf("%s %o %d:%d %s", p.name(below), st.Mode, st.Uid, st.Gid, content)), nil
}

// reserved returns the name of an address file of the built-in network without its addresses.
func reserved(path string) string {
	dir, name := filepath.Split(path)
	if _, owner, ok := strings.Cut(name, "@"); ok {
		name = "addresses@" + normalized(owner)
	}
	return dir + name
}

func exactly(path string) string { return path }

// ofLayer describes a file of a layer or join completely. The described name is the part after the
// digest.
func ofLayer(path, below string, st *unix.Stat_t) (string, error) {
	below = strings.TrimPrefix(strings.TrimPrefix(below, "/images/"), "erofs/")
	_, name, _ := strings.Cut(below, "/") // layers or joins
	_, name, ok := strings.Cut(name, "/") // the digest
	if !ok {
		return inside(path, below, st)
	}
	content, err := inside(path, below, st)
	return modified("/"+name, st) + content, err
}

// inside describes content and attributes.
func inside(path, _ string, st *unix.Stat_t) (string, error) { return sums.of(path, st) }

// normalizedText returns a text with its IDs and numbers replaced.
func normalizedText(path, _ string, st *unix.Stat_t) (string, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		content, err := os.ReadFile(path)
		return fmt.Sprintf("%q", normalized(hardware.ReplaceAllString(string(content), "MAC"))), err
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		return "-> " + normalized(target), err
	}
	return "", nil
}

// unread tells nothing of a file of another program.
func unread(string, string, *unix.Stat_t) (string, error) { return "", nil }

// sized returns the length of a text whose content differs in each run.
func sized(_, _ string, st *unix.Stat_t) (string, error) {
	return fmt.Sprintf("%d bytes", st.Size), nil
}

// hardware matches the hardware address of a network device.
var hardware = regexp.MustCompile(`\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b`)

// logTime matches the beginning of a line in a container's log.
var logTime = regexp.MustCompile(`(?m)^\d{4}-\S+ (stdout|stderr) `)

func logged(path, _ string, st *unix.Stat_t) (string, error) {
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", nil
	}
	content, err := os.ReadFile(path)
	return fmt.Sprintf("%q", logTime.ReplaceAllString(string(content), "T $1 ")), err
}

// exited describes a monitor's record of an exit.
func exited(path, _ string, _ *unix.Stat_t) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	e, err := shimproto.DecodeExit(data)
	return fmt.Sprintf("code %d signal %d out of memory %v", e.Code, e.Signal, e.OOMKilled), err
}

// differing lists the record fields that differ in each run. The inventory notes only their
// presence.
var differing = []string{"runID", "createdAt", "startedAt", "sequence", "pausePID", "pauseStart"}

// recorded returns the fields of a record, with embedded messages decoded.
func recorded(path, _ string, _ *unix.Stat_t) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	header, _, _ := bytes.Cut(data, []byte("\n"))
	kind := ""
	if words := strings.Fields(string(header)); len(words) > 1 {
		kind = words[1]
	}
	version, body, err := record.Decode(kind, data)
	if err != nil {
		return "", err
	}
	fields := map[string]any{}
	if err := json.Unmarshal(body, &fields); err != nil {
		return "", err
	}
	for _, name := range differing {
		if fields[name] != nil {
			fields[name] = "set"
		}
	}
	for name, message := range messagesOf(kind) {
		if err := decodeField(fields, name, message); err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
	}
	text, err := json.Marshal(fields)
	return fmt.Sprintf("%s/%d %s", kind, version, withoutDiffering(string(text))), err
}

// messagesOf returns the fields of a record that contain messages.
func messagesOf(kind string) map[string]proto.Message {
	switch kind {
	case "pod":
		return map[string]proto.Message{"config": &runtimeapi.PodSandboxConfig{}, "resources": &runtimeapi.UpdatePodSandboxResourcesRequest{}}
	case "container":
		return map[string]proto.Message{"config": &runtimeapi.ContainerConfig{}, "resources": &runtimeapi.LinuxContainerResources{}}
	}
	return nil
}

// decodeField replaces a base64 message with its decoded form.
func decodeField(fields map[string]any, name string, message proto.Message) error {
	encoded, ok := fields[name].(string)
	if !ok {
		return nil
	}
	data, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(data, message); err != nil {
		return err
	}
	text, err := compact(message)
	fields[name] = json.RawMessage(text)
	return err
}

// sums caches the digests of unchanged files.
var sums = contentSums{known: map[string]string{}}

type contentSums struct {
	mu    sync.Mutex // protects known
	known map[string]string
}

func (c *contentSums) of(path string, st *unix.Stat_t) (string, error) {
	key := fmt.Sprintf("%d %d %d %v", st.Dev, st.Ino, st.Size, st.Ctim)
	if known, ok := c.get(key); ok {
		return known, nil
	}
	sum, err := insideOf(path, st)
	if err != nil {
		return "", err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[key] = sum
	return sum, nil
}

func (c *contentSums) get(key string) (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sum, ok := c.known[key]
	return sum, ok
}
