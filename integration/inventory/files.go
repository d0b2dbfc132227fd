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

	"berth/checkpoint"
	shimproto "berth/shim/proto"
)

// place is a part of a tree, and what of its files is the same in every run.
type place struct {
	path *regexp.Regexp
	name func(path string) string
	tell func(path, below string, st *unix.Stat_t) (string, error)
}

var (
	rootPlaces = []place{
		{regexp.MustCompile(`^/images/(erofs/)?(layers|joins)/`), exactly, ofLayer},
		{regexp.MustCompile(`^/(bin|images/(erofs/)?empty-[a-z]+)/`), alike, inside},
		{regexp.MustCompile(`^/rootfs/`), alike, inside},
		{regexp.MustCompile(`^/network/`), reserved, func(string, string, *unix.Stat_t) (string, error) { return "", nil }},
		{regexp.MustCompile(`\.record$`), alike, recorded},
		{regexp.MustCompile(``), alike, alikeText},
	}
	statePlaces = []place{
		{regexp.MustCompile(`^/c/[^/]+/exit$`), alike, exited},
		{regexp.MustCompile(`^/run-id$`), alike, sized}, // it is random
		{regexp.MustCompile(``), alike, alikeText},
	}
	logPlaces = []place{{regexp.MustCompile(``), alike, logged}}
)

// addFiles adds the files of a tree, each with its type, mode, owner and content summary.
func addFiles(s Items, where, root string, places []place) {
	names := fileNames{}
	_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone meanwhile: there will be another look
		}
		below := strings.TrimPrefix(path, root)
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

// line describes one file. The error wraps fs.ErrNotExist if the file is gone. Any other error
// becomes part of the line.
func (p place) line(path, below string, names fileNames) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if first := names.another(below, &st); first != "" {
		return p.name(below) + " is another name of " + p.name(first), nil
	}
	content, err := p.tell(path, below, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if err != nil {
		content = alike(err.Error())
	}
	return strings.TrimSpace(fmt.Sprintf("%s %o %d:%d %s", p.name(below), st.Mode, st.Uid, st.Gid, content)), nil
}

// reserved is the name of a file of berth's own network, which begins with addresses.
func reserved(path string) string {
	dir, name := filepath.Split(path)
	if _, owner, ok := strings.Cut(name, "@"); ok {
		name = "addresses@" + alike(owner)
	}
	return dir + name
}

func exactly(path string) string { return path }

// ofLayer describes a file of a layer or join completely. Its name is the part after the digest.
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

// alikeText returns a text with its IDs and numbers replaced.
func alikeText(path, _ string, st *unix.Stat_t) (string, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		content, err := os.ReadFile(path)
		return fmt.Sprintf("%q", alike(hardware.ReplaceAllString(string(content), "MAC"))), err
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		return "-> " + alike(target), err
	}
	return "", nil
}

// sized returns the length of a text whose content differs in each run.
func sized(_, _ string, st *unix.Stat_t) (string, error) {
	return fmt.Sprintf("%d bytes", st.Size), nil
}

// hardware is the address of a network device.
var hardware = regexp.MustCompile(`\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b`)

// logTime begins the lines of a container's log.
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
	version, body, err := checkpoint.Decode(kind, data)
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

// messagesOf are the fields of a record that are messages.
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
	mu    sync.Mutex // guards known
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
