package kata

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/ttrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"
)

// request has the fields of all requests that a Guest answers, and of the OCI spec in them.
type request struct {
	ID          string // of a virtual machine
	Annotations map[string]string
	NetNS       string
	Hostname    string
	ContainerID string
	ExecID      string
	Spec        specs.Spec
	Process     specs.Process
	Resources   specs.LinuxResources
	Signal      int
	Data        []byte
	Len         int
	Row, Column uint16

	// Of CopyFile.
	Path     string
	FileMode uint32
	DirMode  uint32
	UID, GID int
	Offset   int64
}

// kind is the type of a field. Fields that are messages have the kind message.
type kind int

const (
	number  kind = iota // int32, int64
	natural             // uint32, uint64
	flag
	text
	data
	message
	pairs // map<string, string>
)

type field struct {
	name string // in JSON
	kind kind
	many bool
	of   fields // of a message
}

// fields are the known fields of a message by number.
type fields map[protowire.Number]field

// The messages of Kata's protocols/hypervisor.proto, agent.proto and oci.proto, as far as a Guest
// needs them. The names are those of request and of the runtime-spec.
var (
	vmFields = fields{
		1: {name: "id", kind: text}, 2: {name: "annotations", kind: pairs}, 3: {name: "netNS", kind: text},
	}
	sandboxFields = fields{1: {name: "hostname", kind: text}}
	processIDs    = fields{1: {name: "containerID", kind: text}, 2: {name: "execID", kind: text}}
	createFields  = processIDs.with(fields{6: {name: "spec", kind: message, of: specFields}})
	execFields    = processIDs.with(fields{4: {name: "process", kind: message, of: processFields}})
	signalFields  = processIDs.with(fields{3: {name: "signal", kind: natural}})
	updateFields  = fields{
		1: {name: "containerID", kind: text}, 2: {name: "resources", kind: message, of: resourceFields},
	}
	writeFields   = processIDs.with(fields{3: {name: "data", kind: data}})
	readFields    = processIDs.with(fields{3: {name: "len", kind: natural}})
	winsizeFields = processIDs.with(fields{3: {name: "row", kind: natural}, 4: {name: "column", kind: natural}})
	copyFields    = fields{
		1: {name: "path", kind: text}, 3: {name: "fileMode", kind: natural}, 4: {name: "dirMode", kind: natural},
		5: {name: "uid", kind: number}, 6: {name: "gid", kind: number}, 7: {name: "offset", kind: number},
		8: {name: "data", kind: data},
	}

	specFields = fields{
		1: {name: "ociVersion", kind: text},
		2: {name: "process", kind: message, of: processFields},
		3: {name: "root", kind: message, of: fields{1: {name: "path", kind: text}, 2: {name: "readonly", kind: flag}}},
		4: {name: "hostname", kind: text},
		5: {name: "mounts", kind: message, many: true, of: fields{
			1: {name: "destination", kind: text}, 2: {name: "source", kind: text}, 3: {name: "type", kind: text},
			4: {name: "options", kind: text, many: true},
		}},
		8: {name: "linux", kind: message, of: fields{
			3: {name: "sysctl", kind: pairs},
			4: {name: "resources", kind: message, of: resourceFields},
			6: {name: "namespaces", kind: message, many: true, of: fields{
				1: {name: "type", kind: text}, 2: {name: "path", kind: text},
			}},
			9:  {name: "rootfsPropagation", kind: text},
			10: {name: "maskedPaths", kind: text, many: true},
			11: {name: "readonlyPaths", kind: text, many: true},
		}},
	}
	processFields = fields{
		1: {name: "terminal", kind: flag},
		3: {name: "user", kind: message, of: fields{
			1: {name: "uid", kind: natural}, 2: {name: "gid", kind: natural},
			3: {name: "additionalGids", kind: natural, many: true},
		}},
		4: {name: "args", kind: text, many: true},
		5: {name: "env", kind: text, many: true},
		6: {name: "cwd", kind: text},
		7: {name: "capabilities", kind: message, of: fields{
			1: {name: "bounding", kind: text, many: true}, 2: {name: "effective", kind: text, many: true},
			3: {name: "inheritable", kind: text, many: true}, 4: {name: "permitted", kind: text, many: true},
			5: {name: "ambient", kind: text, many: true},
		}},
		9: {name: "noNewPrivileges", kind: flag},
	}
	resourceFields = fields{
		2: {name: "memory", kind: message, of: fields{1: {name: "limit", kind: number}}},
		3: {name: "cpu", kind: message, of: fields{
			1: {name: "shares", kind: natural}, 2: {name: "quota", kind: number}, 3: {name: "period", kind: natural},
		}},
	}
)

func (f fields) with(more fields) fields {
	all := fields{}
	for _, some := range []fields{f, more} {
		for number, field := range some {
			all[number] = field
		}
	}
	return all
}

// decode returns the known fields of a message as a JSON object.
func (f fields) decode(message []byte) (map[string]any, error) {
	object := map[string]any{}
	for len(message) > 0 {
		number, wire, n := protowire.ConsumeTag(message)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		message = message[n:]
		n = protowire.ConsumeFieldValue(number, wire, message)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		if field, ok := f[number]; ok {
			if err := field.decode(wire, message[:n], object); err != nil {
				return nil, fmt.Errorf("field %s: %w", field.name, err)
			}
		}
		message = message[n:]
	}
	return object, nil
}

// decode adds a value to an object.
func (f field) decode(wire protowire.Type, value []byte, object map[string]any) error {
	if wire == protowire.VarintType {
		v, _ := protowire.ConsumeVarint(value)
		f.add(object, f.integer(v))
		return nil
	}
	content, n := protowire.ConsumeBytes(value)
	if n < 0 {
		return protowire.ParseError(n)
	}
	switch f.kind {
	case text:
		f.add(object, string(content))
	case data:
		f.add(object, content)
	case message:
		inner, err := f.of.decode(content)
		if err != nil {
			return err
		}
		f.add(object, inner)
	case pairs:
		pair, err := fields{1: {name: "key", kind: text}, 2: {name: "value", kind: text}}.decode(content)
		if err != nil {
			return err
		}
		all, _ := object[f.name].(map[string]any)
		if all == nil {
			all = map[string]any{}
		}
		key, _ := pair["key"].(string)
		all[key] = pair["value"]
		object[f.name] = all
	default: // packed
		for len(content) > 0 {
			v, n := protowire.ConsumeVarint(content)
			if n < 0 {
				return protowire.ParseError(n)
			}
			f.add(object, f.integer(v))
			content = content[n:]
		}
	}
	return nil
}

func (f field) integer(v uint64) any {
	switch f.kind {
	case flag:
		return v != 0
	case number:
		return int64(v)
	}
	return v
}

func (f field) add(object map[string]any, value any) {
	if f.many {
		list, _ := object[f.name].([]any)
		value = append(list, value)
	}
	object[f.name] = value
}

// method returns a method of a service. Its messages are unknown fields of an empty one.
func method(f fields, do func(context.Context, *request) (answer []byte, err error)) ttrpc.Method {
	return func(ctx context.Context, unmarshal func(any) error) (any, error) {
		var raw emptypb.Empty
		if err := unmarshal(&raw); err != nil {
			return nil, err
		}
		object, err := f.decode(raw.ProtoReflect().GetUnknown())
		if err != nil {
			return nil, err
		}
		document, err := json.Marshal(object)
		if err != nil {
			return nil, err
		}
		var r request
		if err := json.Unmarshal(document, &r); err != nil {
			return nil, err
		}
		answer, err := do(ctx, &r)
		if err != nil {
			return nil, err
		}
		out := &emptypb.Empty{}
		out.ProtoReflect().SetUnknown(answer)
		return out, nil
	}
}

func appendNumber(to []byte, field protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(to, field, protowire.VarintType), value)
}

func appendBytes(to []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(to, field, protowire.BytesType), value)
}
