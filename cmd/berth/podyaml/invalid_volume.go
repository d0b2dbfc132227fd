package podyaml

import (
	"reflect"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// sources returns the number of pointers that are set in a struct, which is a union: a volume's
// source, a handler, a probe.
func sources(union any) int {
	v := reflect.Indirect(reflect.ValueOf(union))
	n := 0
	for i := range v.NumField() {
		switch f := v.Field(i); {
		case v.Type().Field(i).Anonymous:
			n += sources(f.Addr().Interface())
		case f.Kind() == reflect.Pointer && f.Type().Elem().Kind() == reflect.Struct && !f.IsNil():
			n++
		}
	}
	return n
}

func (c *checker) volume(at string, v *corev1.Volume) {
	switch {
	case v.EmptyDir != nil:
		c.emptyDir(at+".emptyDir", v.EmptyDir)
	case v.HostPath != nil:
		c.hostPath(at+".hostPath", v.HostPath)
	case v.PersistentVolumeClaim != nil:
		name := v.PersistentVolumeClaim.ClaimName
		c.addAll(at+".persistentVolumeClaim.claimName", name, validation.IsDNS1123Subdomain(name))
	case v.Image != nil:
		if err := checkImage(v.Image.Reference); err != nil {
			c.add(at+".image.reference", "%q: %v", v.Image.Reference, err)
		}
		oneOf(c, at+".image.pullPolicy", v.Image.PullPolicy, corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
	case v.ConfigMap != nil:
		c.items(at+".configMap", v.ConfigMap.Items, v.ConfigMap.DefaultMode)
		c.fileVolume(at+".configMap", v)
	case v.Secret != nil:
		c.items(at+".secret", v.Secret.Items, v.Secret.DefaultMode)
		c.fileVolume(at+".secret", v)
	case v.DownwardAPI != nil:
		c.downwardItems(at+".downwardAPI", v.DownwardAPI.Items, v.DownwardAPI.DefaultMode)
	case v.Projected != nil:
		c.projected(at+".projected", v)
	}
}

// fileVolume checks that the volume's ConfigMaps and Secrets exist with their keys.
func (c *checker) fileVolume(at string, v *corev1.Volume) {
	if _, err := (&Plan{Pod: c.pod, Objects: c.objects}).VolumeFiles(v); err != nil {
		c.add(at, "%v", err)
	}
}

func (c *checker) projected(at string, v *corev1.Volume) {
	before := len(c.problems)
	for i := range v.Projected.Sources {
		s := &v.Projected.Sources[i]
		where := index(at+".sources", i)
		if sources(s) != 1 {
			c.add(where, "needs one source")
		}
		switch {
		case s.ConfigMap != nil:
			c.items(where+".configMap", s.ConfigMap.Items, v.Projected.DefaultMode)
		case s.Secret != nil:
			c.items(where+".secret", s.Secret.Items, v.Projected.DefaultMode)
		case s.DownwardAPI != nil:
			c.downwardItems(where+".downwardAPI", s.DownwardAPI.Items, v.Projected.DefaultMode)
		}
	}
	if len(c.problems) == before {
		c.fileVolume(at, v)
	}
}

func (c *checker) items(at string, items []corev1.KeyToPath, mode *int32) {
	c.mode(at+".defaultMode", mode)
	for i, item := range items {
		c.filePath(index(at+".items", i)+".path", item.Path)
		c.mode(index(at+".items", i)+".mode", item.Mode)
	}
}

func (c *checker) downwardItems(at string, items []corev1.DownwardAPIVolumeFile, mode *int32) {
	c.mode(at+".defaultMode", mode)
	for i, item := range items {
		where := index(at+".items", i)
		c.filePath(where+".path", item.Path)
		c.mode(where+".mode", item.Mode)
		switch {
		case (item.FieldRef == nil) == (item.ResourceFieldRef == nil):
			c.add(where, "needs fieldRef or resourceFieldRef")
		case item.ResourceFieldRef != nil && item.ResourceFieldRef.ContainerName == "":
			c.add(where+".resourceFieldRef.containerName", "is needed")
		case item.ResourceFieldRef != nil:
			if err := checkResourceRef(c.pod, nil, item.ResourceFieldRef); err != nil {
				c.add(where+".resourceFieldRef", "%v", err)
			}
		default:
			c.volumeField(where+".fieldRef", item.FieldRef)
		}
	}
}

// volumeField checks a field of a downwardAPI volume, which can also be a whole map.
func (c *checker) volumeField(at string, ref *corev1.ObjectFieldSelector) {
	switch ref.FieldPath {
	case "metadata.labels", "metadata.annotations", "metadata.name", "metadata.namespace", "metadata.uid":
		return
	}
	if fieldPaths[ref.FieldPath] != nil {
		c.add(at, "field %q can only be a variable", ref.FieldPath)
	} else if err := checkFieldRef(ref); err != nil {
		c.add(at, "%v", err)
	}
}

// filePath checks the path of a file in a volume.
func (c *checker) filePath(at, path string) {
	if path == "" {
		c.add(at, "is needed")
	}
	c.within(at, path)
}

func (c *checker) mode(at string, mode *int32) {
	if mode != nil && (*mode < 0 || *mode > maxFileMode) {
		c.add(at, "%#o is not between 0 and %#o", *mode, maxFileMode)
	}
}
