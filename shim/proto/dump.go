package proto

import (
	"errors"
	"os"

	"berth/internal/criu"
)

// Dump asks a launcher to prepare a dump of a running container. The launcher starts CRIU and
// checks whether the container can be dumped. The launcher answers with Reply.Dump. Then the daemon
// freezes the container and sends DumpNow, and the launcher answers again with Reply.Dump. It exits
// after the second answer, after an error, and when the connection ends. After a successful dump it
// answers before it waits for CRIU's end, because CRIU does not touch the container any more.
//
// If the connection ends during the dump, CRIU gets a moment to end by itself, and then the
// launcher kills CRIU. A kill at the wrong time can end a process of the container.
type Dump struct {
	ID   string `json:"id"`   // the container
	CRIU string `json:"criu"` // path of the program

	// Dir is the directory for the result, which comes with the message. CRIU's images are written
	// below it in ImagesDir. CRIU's log and statistics are written into it.
	Dir *os.File `json:"-"`
}

// ImagesDir is the directory of CRIU's images below Dump.Dir. It is the name that other tools use.
const ImagesDir = "checkpoint"

// DumpLog is the name of CRIU's log in Dump.Dir.
const DumpLog = "dump.log"

// Dumped answers a Dump and a DumpNow.
type Dumped struct {
	CRIU       criu.Version `json:"criu"`
	BindMounts []string     `json:"bindMounts,omitempty"` // the mount points in the container that the images do not contain
}

// PassFiles returns the files to send with the request. The caller still owns them.
func (d *Dump) PassFiles() []*os.File { return []*os.File{d.Dir} }

// TakeFiles assigns the files that came with the request.
func (d *Dump) TakeFiles(files []*os.File) error {
	if len(files) != 1 {
		return errors.Join(errFiles, closeAll(files))
	}
	d.Dir = files[0]
	return nil
}

// CRIUGroupPrefix begins the name of the cgroup of a CRIU, below the daemon's own cgroup. The
// container's ID follows.
const CRIUGroupPrefix = "berth-criu-"

// CRIUGroup returns the name of the cgroup of the CRIU that dumps a container.
func CRIUGroup(containerID string) string { return CRIUGroupPrefix + containerID }
