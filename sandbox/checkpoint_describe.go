package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process"
	"berth/checkpoint/process/archive"
	"berth/image"
	"berth/internal/criu"
)

// describe writes the files about the containers and returns the manifest.
func (j *checkpointJob) describe(ctx context.Context) (*archive.Manifest, error) {
	pod, err := j.describePod()
	if err != nil {
		return nil, err
	}
	var program criu.Version
	manifest := &archive.Manifest{CreatedAt: j.frozenAt}
	if j.pod.Sandboxed() {
		manifest.Runtime = j.pod.Runtime.Version
	} else {
		program = j.parts[0].dump.Info().CRIU
	}
	if manifest.Node, err = process.DescribeNode(program); err != nil {
		return nil, err
	}
	if j.whole {
		manifest.Pod = &pod
	}
	for _, part := range j.parts {
		c, err := j.describeContainer(part)
		if err != nil {
			return nil, err
		}
		files, err := j.filesOf(ctx, part)
		if err != nil {
			return nil, err
		}
		if err := archive.WriteContainer(j.dir, manifest, pod, c, files); err != nil {
			return nil, err
		}
		if err := process.WriteBindMounts(part.dir, part.Config.GetMounts(), part.mounted); err != nil {
			return nil, err
		}
		manifest.Containers = append(manifest.Containers, *c)
	}
	return manifest, nil
}

func (j *checkpointJob) describePod() (archive.Pod, error) {
	config, err := encodeProto(j.pod.Config)
	var ips []netip.Addr
	for _, text := range j.pod.Info().IPs {
		if ip, err := netip.ParseAddr(text); err == nil {
			ips = append(ips, ip)
		}
	}
	metadata := j.pod.Config.GetMetadata()
	return archive.Pod{
		ID: j.pod.ID, Name: metadata.GetName(), Namespace: metadata.GetNamespace(), UID: metadata.GetUid(),
		Attempt: metadata.GetAttempt(), Handler: j.pod.Handler, IPs: ips, Config: config,
	}, err
}

func (j *checkpointJob) describeContainer(part *checkpointPart) (*archive.Container, error) {
	config, err := encodeProto(part.Config)
	if err != nil {
		return nil, err
	}
	metadata := part.Config.GetMetadata()
	c := &archive.Container{Name: metadata.GetName(), ID: part.ID, Attempt: metadata.GetAttempt(), Config: config}
	c.Image = archive.Image{Name: writtenName(part.Config), Ref: part.Image.Ref, ID: part.Image.ID}
	for _, l := range j.k.images.LayersOf(&image.Image{ID: part.Image.ID, Layers: part.Image.Layers}) {
		c.Image.Layers = append(c.Image.Layers, archive.Layer{Blob: l.Blob.String(), DiffID: l.DiffID.String()})
	}
	return c, nil
}

// filesOf returns the description of a container for other programs.
func (j *checkpointJob) filesOf(ctx context.Context, part *checkpointPart) (archive.ContainerFiles, error) {
	k := j.k
	runtimeSpec, err := k.launcher.RuntimeSpec(ctx, j.pod.Info(), part.snapshot(), k.objects.targetPIDNS(part.container))
	if err != nil {
		return archive.ContainerFiles{}, fmt.Errorf("describe container %s: %w", part.ID, err)
	}
	status, err := encodeProto(&runtimeapi.ContainerStatus{
		Id: part.ID, Metadata: part.Config.GetMetadata(), State: runtimeapi.ContainerState_CONTAINER_RUNNING,
		CreatedAt: part.CreatedAt.UnixNano(), StartedAt: part.snapshot().StartedAt.UnixNano(),
		Image: part.Config.GetImage(), ImageRef: part.Image.Ref, ImageId: part.Image.ID,
		Labels: part.Config.GetLabels(), Annotations: part.Config.GetAnnotations(), LogPath: part.LogPath,
	})
	files := archive.ContainerFiles{
		Spec: runtimeSpec, Labels: part.Config.GetLabels(), Annotations: part.Config.GetAnnotations(),
		CreatedAt: part.CreatedAt, Status: status,
	}
	if ips := j.pod.Info().IPs; len(ips) > 0 {
		files.IP = ips[0]
	}
	return files, err
}

func encodeProto(m proto.Message) (json.RawMessage, error) {
	data, err := protojson.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w", m, err)
	}
	return data, nil
}
