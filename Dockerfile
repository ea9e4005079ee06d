# The course and its local Slurm, for a Mac, Windows, or any machine without Debian:
#   docker build -t ddp-course . && docker run --rm -it -p 127.0.0.1:8888:8888 ddp-course
# then open the address with the token that JupyterLab prints. What you write stays in the container: mount a folder for it.
FROM python:3.12-bookworm
WORKDIR /course
COPY . .
# pip's copies of the packages, gigabytes, would stay in the image.
RUN PIP_NO_CACHE_DIR=1 make system .venv/installed staged
EXPOSE 8888
# Inside, JupyterLab must listen on the container's own address; -p 127.0.0.1:… keeps it on your machine.
CMD ["make", "lab", "LAB_IP=0.0.0.0"]
